"""What takes minutes: run by `make soak`, never by `make test`. SOAK_S bounds each of them, in seconds."""
