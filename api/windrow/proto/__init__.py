"""Generated gRPC stubs of `proto/windrow/v1` (`make proto`)."""
