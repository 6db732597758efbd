"""Dry run of an engine on fake devices, rank by rank: what it holds, sends, waits for, where it fails."""
