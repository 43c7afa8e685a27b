"""CPU: operations in C++, and the Python code that uses them."""
