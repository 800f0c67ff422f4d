version: str
torch_version: str
cuda_version: str
library: str
