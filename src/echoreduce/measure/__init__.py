"""Measuring: timing, numeric error, and the record that every figure carries (hardware, versions, commit, command)."""
