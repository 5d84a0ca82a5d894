"""What computing in bfloat16 does to the policy gradient; run as `python -m benchmarks.bf16_gradient`."""
