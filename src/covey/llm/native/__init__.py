"""C++ kernels: source in `csrc/`, compilation in `build`, Python bindings in `bindings`. Independent of models."""
