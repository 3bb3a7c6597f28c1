// The text of a kernel includes this by name; all of it is in cuda_on_cpu.h, which comes first.
