#include "native.cpp"  // NOLINT: one source, one build per instruction set
