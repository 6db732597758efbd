"""A run's engine, rank by rank, on devices that are not there: what it holds, sends, waits for, and where it
would fail."""
