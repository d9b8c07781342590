"""The machine below a run: device, threads and memory, random numbers, optimizer, checkpoints, cache, signals."""
