"""The device side: pool, copies, kernels, GPUDirect Storage, and the self-check.

Where to begin: `arena.Arena` is the engine's pool and moves blocks between it and host memory; `probe.probe` and
`probe.open_path` give a way between it and a slab file; `doctor.report` says what this machine has. CuPy and kvikio
are imported only when a path that needs them is opened, and PyTorch only by the modules that use it.
"""
