"""The node service: gRPC over a unix socket and TCP, descriptors over a second unix socket, metrics over HTTP."""
