"""The mechanisms that every part shares: memory, copies, time, accounts, telemetry."""
