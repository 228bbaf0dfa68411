"""Builds kernels of AMD's Composable Kernel from a registry package and runs them in the interpreter, under the production ck engine."""
