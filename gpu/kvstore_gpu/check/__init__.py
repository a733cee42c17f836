"""The self-check: `python -m kvstore_gpu.check --json out.json`.

Verifies on the device, against the host's results, what the tests verify without one, and measures each path
against a limit measured in the same run. Runs to the end on a machine without a device too, and lists what it had
to skip.
"""
