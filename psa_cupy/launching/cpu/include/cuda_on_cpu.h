// CUDA C kernels as C++: what a kernel's text needs of the language and of the device, for the CPU.
//
// Every CUDA thread is a fiber of the runtime (../runtime). This header gives kernels CUDA's names; each
// piece says what it stands for. The compiler includes it in front of every kernel (-include), and defines
// CUDA_ON_CPU_CHECKED for checked builds.
#pragma once
#define CUDA_ON_CPU 1

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "language.h"
#include "runtime.h"
#include "intrinsics.h"
#include "float16.h"
#include "collectives.h"
#include "atomics.h"
#include "tensor_core.h"
#include "entry.h"
