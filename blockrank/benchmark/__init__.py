"""Rankers side by side on the same prompts: latency, memory, share of the chip's matmul rate, and why."""
