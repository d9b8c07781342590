"""C++ kernels: `csrc/` has the source, `build` compiles it once, `bindings` calls it. A leaf: knows no model."""
