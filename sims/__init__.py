"""What would happen: serving traces, waste accounting, capacity."""
