"""vLLM servers: as replicas of a fleet (`engine`), and as samplers of a run (`sampler`)."""
