"""Thin layers between a session and somebody else's model or framework."""
