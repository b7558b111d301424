"""The one thing pyproject.toml can't say plainly: patches/ is installed as vllm_rocm_fixes.patches."""

from setuptools import setup

setup(
    packages=["vllm_rocm_fixes", "vllm_rocm_fixes.guards", "vllm_rocm_fixes.cli", "vllm_rocm_fixes.patches"],
    package_dir={"vllm_rocm_fixes.patches": "patches"},
    package_data={"vllm_rocm_fixes": ["py.typed", "standin/**/*", "tracer/*.py", "cli/*.html"]},
)
