version: str
torch_version: str
cuda_version: str
cuda_architectures: str
gemm_architectures: str
compiler: str
library: str
