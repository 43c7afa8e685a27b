"""A CPU: operations in C++ and the Python beside them."""
