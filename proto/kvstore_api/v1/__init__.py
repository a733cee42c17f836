"""Generated gRPC stubs of the service; see `kvstore.proto`."""
