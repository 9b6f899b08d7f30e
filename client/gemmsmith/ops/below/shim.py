"""Functions of torch's C shim and C++ for the compiled binding, by address; handles of tensors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

_SHIM = (
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
    "aoti_torch_get_device_index",
    "aoti_torch_get_data_ptr",
    "aoti_torch_empty_strided",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_new_tensor_handle",
    "aoti_torch_library_init_impl",
    "aoti_torch_library_impl",
    "aoti_torch_{kind}_mm_out",
    "aoti_torch_{kind}_bmm_out",
    "_ZN2at13globalContextEv",  # at::globalContext()
    "_ZNK2at7Context23deterministicAlgorithmsEv",  # at::Context::deterministicAlgorithms() const
    "_ZNK2at7Context24allowBF16ReductionCuBLASEv",  # … allowBF16ReductionCuBLAS() const
    "_ZNK2at7Context24allowFP16ReductionCuBLASEv",  # … allowFP16ReductionCuBLAS() const
)
"""Functions of torch's C shim and, for its settings, of its C++, in the order of `gs_torch`; the
stream's follows them."""

MM_DTYPE = "aoti_torch_{kind}_mm_dtype_out"
_OPTIONAL = (
    "aoti_torch_{kind}__int_mm_out",
    MM_DTYPE,
    # at::Context::float32Precision(Float32Backend, Float32Op) const, since torch 2.10
    "_ZNK2at7Context16float32PrecisionENS_14Float32BackendENS_9Float32OpE",
    "_ZN2at11NoTF32Guard19should_disable_tf32Ev",  # at::NoTF32Guard::should_disable_tf32()
    # c10::Error::Error(c10::SourceLocation, std::string), and of c10::OutOfMemoryError the table of
    # virtual functions and the type.
    "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    "_ZTVN3c1016OutOfMemoryErrorE",
    "_ZTIN3c1016OutOfMemoryErrorE",
    "_ZNK3c1014KernelFunction9dumpStateB5cxx11Ev",  # c10::KernelFunction::dumpState() const
    # torch::CppFunction::CppFunction(KernelFunction, optional<CppSignature>, unique_ptr<Schema>)
    "_ZN5torch11CppFunctionC1EN3c1014KernelFunctionESt8optionalINS1_4impl12CppSignatureEE"
    "St10unique_ptrINS1_14FunctionSchemaESt14default_deleteIS8_EE",
    "_ZN5torch11CppFunctionD1Ev",
    # torch::Library::_impl(char const*, torch::CppFunction&&, torch::_RegisterOrVerify) &
    "_ZNR5torch7Library5_implEPKcONS_11CppFunctionENS_17_RegisterOrVerifyE",
    "_ZN2at3cpu19_local_scalar_denseERKNS_6TensorE",  # at::cpu::_local_scalar_dense(Tensor const&)
    "aoti_torch_delete_library_object",
)
"""Further functions, which a torch may lack. Then it computes the products that need them, an error
for too little memory is a plain RuntimeError, and Python computes what overrides in Python do."""


_capsules_of = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
# Not the one for a single tensor, which keeps it for ever (torch 2.13).
tensors_of = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
capsule_of = ctypes.pythonapi.PyCapsule_New
capsule_of.restype = ctypes.py_object
capsule_of.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class ShimTable(ctypes.Structure):
    _fields_ = [(f"f{i}", ctypes.c_void_p) for i in range(len(_SHIM) + 1 + len(_OPTIONAL))]

    def has(self, optional: str) -> bool:
        return bool(getattr(self, f"f{len(_SHIM) + 1 + _OPTIONAL.index(optional)}"))


def handle_of(tensor: torch.Tensor) -> int:
    """A handle that the caller owns."""
    handle: int = _pointer_of(_capsules_of([tensor])[0], None)
    return handle


def owned(handle: int) -> torch.Tensor:
    tensor: torch.Tensor = tensors_of([capsule_of(handle, None, None)])[0]
    return tensor


def address_of(kernel: Any) -> int | None:
    """The address of the c10::KernelFunction in a kernel of `torch.library.get_kernel`, for ever.

    Returns None if this torch's kernels are not pybind11's objects, whose content follows Python's.
    """
    if getattr(type(kernel).__base__, "__name__", "") != "pybind11_object":
        return None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kernel))
    return ctypes.c_void_p.from_address(id(kernel) + object.__basicsize__).value


def functions_for(kind: str, stream: Any) -> ShimTable:
    """Addresses of torch's C shim in the libraries that torch has loaded.

    Raises:
        AttributeError: this torch has no such function.
        OSError: there is no such library.
    """
    folder = Path(torch.__file__).parent / "lib"
    libraries = [ctypes.CDLL(str(folder / "libtorch_cpu.so"))]
    if kind == "cuda":
        libraries.insert(0, ctypes.CDLL(str(folder / "libtorch_cuda.so")))

    def find(name: str) -> int | None:
        for library in libraries:
            if hasattr(library, name):
                return ctypes.cast(library[name], ctypes.c_void_p).value
        return None

    def need(name: str) -> int:
        address = find(name)
        if address is None:
            raise AttributeError(f"torch {torch.__version__} has no {name}")
        return address

    addresses: list[int | None] = [need(name.format(kind=kind)) for name in _SHIM]
    if stream is None:
        addresses.append(need("aoti_torch_get_current_cuda_stream"))
    else:
        addresses.append(ctypes.cast(stream, ctypes.c_void_p).value)
    addresses += [find(name.format(kind=kind)) for name in _OPTIONAL]
    return ShimTable(*addresses)
