"""Long tests of `make soak`, never run by `make test`. SOAK_S limits each, in seconds."""
