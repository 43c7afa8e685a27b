"""What makes it fast on one device, each beside a plain reference."""
