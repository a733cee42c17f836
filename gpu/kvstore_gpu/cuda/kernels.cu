// Everything, as one module.
#include "transfer.cu"
#include "checksum.cu"
#include "fill.cu"
#include "decode.cu"
