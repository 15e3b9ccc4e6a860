"""The shell around the core: gRPC, clocks, text, metrics and traces."""
