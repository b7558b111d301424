"""What is done to the process, and not to vLLM."""
