"""Ways to move the bytes of a bucket. Each has a sending end and, where the engine must fetch, a receiving one."""
