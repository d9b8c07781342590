"""C++ kernels: source in `csrc/`, compilation in `build`, libraries of wheels in `variants`, Python bindings in
`bindings`. Independent of models."""
