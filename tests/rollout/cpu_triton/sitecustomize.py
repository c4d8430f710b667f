"""Lets vLLM's build for CPUs take Triton from PyPI, which has no backend for a CPU: with TRITON_INTERPRET=1 Triton's
interpreter computes the kernels, and vLLM only asks that such a backend is there. On PYTHONPATH, as vLLM looks at its
models' classes in processes of its own."""

from types import SimpleNamespace

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
