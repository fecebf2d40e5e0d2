"""Guards: what the source may not become. Exceptions, each with its reason, are in `allowed.toml`."""
