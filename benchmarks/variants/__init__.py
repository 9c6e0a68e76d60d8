"""What only the suites run: other filters, other environments, other implementations of PPO. The scripts are in the root."""
