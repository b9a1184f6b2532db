//! Operations of libtorch that tch does not bind, by name, through the C entry point that libtorch keeps
//! stable for extensions (`torch/csrc/stable/c/shim.h`).
#![expect(unsafe_code, reason = "libtorch's dispatcher is a C function over untyped words")]

use std::ffi::{CStr, c_char, c_void};

use tch::Tensor;

use crate::error::{Error, Result};

/// libtorch 2.11 as the shim writes versions: major, minor and patch in the three highest bytes.
const LIBTORCH: u64 = (2 << 56) | (11 << 48);
/// Words on the stack. More than any operation here takes: one that has got optional arguments since finds
/// them absent.
const STACK: usize = 32;

unsafe extern "C" {
    /// Takes its arguments from the stack, leaves its results there, and returns 0; else it has logged why
    /// not.
    fn torch_call_dispatcher(
        name: *const c_char,
        overload: *const c_char,
        stack: *mut u64,
        version: u64,
    ) -> i32;
    /// Makes an empty list with room for so many words, and returns 0.
    fn torch_new_list_reserve_size(size: usize, list: *mut *mut c_void) -> i32;
    /// Appends a word, and returns 0.
    fn torch_list_push_back(list: *mut c_void, word: u64) -> i32;
    /// C++'s `operator new(size_t)`.
    #[link_name = "_Znwm"]
    fn operator_new(size: usize) -> *mut c_void;
}

/// An argument of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Value<'a> {
    Tensor(&'a Tensor),
    Tensors(&'a [&'a Tensor]),
    /// An optional tensor; `None` stands for an absent value of any type.
    MaybeTensor(Option<&'a Tensor>),
    Int(i64),
    Float(f64),
    Bool(bool),
}

impl Value<'_> {
    /// The word that stands for it. Tensors are handed over: the callee frees the handle.
    fn into_word(self) -> u64 {
        match self {
            Value::Tensor(tensor) => handle(tensor),
            Value::Tensors(tensors) => list(tensors),
            Value::MaybeTensor(None) => 0,
            Value::MaybeTensor(Some(tensor)) => {
                // SAFETY: 8 bytes from C++'s allocator, which throws rather than return null, are aligned for
                // a word. The callee reads the word and frees it with C++'s `operator delete`.
                unsafe {
                    let word = operator_new(size_of::<u64>()).cast::<u64>();
                    word.write(handle(tensor));
                    word as u64
                }
            }
            Value::Int(value) => value as u64,
            Value::Float(value) => value.to_bits(),
            Value::Bool(value) => u64::from(value),
        }
    }
}

/// A new owner of the same tensor: an `at::Tensor` on C++'s heap, which is what both tch and the shim mean by
/// a handle.
fn handle(tensor: &Tensor) -> u64 {
    let mut owner = std::mem::ManuallyDrop::new(tensor.shallow_clone());
    owner.as_mut_ptr() as u64
}

/// A list of tensors, which the callee frees, as it does the handles in it.
fn list(tensors: &[&Tensor]) -> u64 {
    let mut list = std::ptr::null_mut();
    // SAFETY: the pointer is to a local that outlives the call. A list that could not be made stays null, to
    // which nothing is appended; the callee refuses it.
    unsafe {
        if torch_new_list_reserve_size(tensors.len(), &raw mut list) == 0 {
            for tensor in tensors {
                torch_list_push_back(list, handle(tensor));
            }
        }
    }
    list as u64
}

/// Calls `name.overload`, which must return `N` tensors, with all of its arguments in order.
///
/// # Errors
/// [`Error::Operation`] if there is no such operation or it refuses; libtorch has then logged why.
pub(crate) fn call<const N: usize>(
    name: &CStr,
    overload: &CStr,
    arguments: &[Value<'_>],
) -> Result<[Tensor; N]> {
    let mut stack = [0_u64; STACK];
    for (word, argument) in stack.iter_mut().zip(arguments) {
        *word = argument.into_word();
    }
    // SAFETY: names are NUL-terminated. The stack has a word for every argument and result. Each word is of
    // the type that the operation's schema names at its place, which callers see to.
    let failed =
        unsafe { torch_call_dispatcher(name.as_ptr(), overload.as_ptr(), stack.as_mut_ptr(), LIBTORCH) };
    if failed != 0 {
        return Err(Error::Operation { name: name.to_string_lossy().into_owned() });
    }
    // SAFETY: after success the first words are handles of the results, ours to free; each is taken once.
    Ok(std::array::from_fn(|index| unsafe { Tensor::from_ptr(stack[index] as *mut _) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn an_operation_by_name_computes_and_is_differentiated() {
        let a = Tensor::from_slice(&[2.0_f32, 3.0]).set_requires_grad(true);
        let b = Tensor::from_slice(&[5.0_f32, 7.0]);
        let [product] = call::<1>(c"aten::mul", c"Tensor", &[Value::Tensor(&a), Value::Tensor(&b)]).unwrap();
        product.sum(Kind::Float).backward();
        assert_eq!(Vec::<f32>::try_from(&product.detach()).unwrap(), [10.0, 21.0]);
        assert_eq!(Vec::<f32>::try_from(&a.grad()).unwrap(), [5.0, 7.0]);
    }

    #[test]
    fn optional_tensors_numbers_and_flags_arrive() {
        // clamp.Tensor(self, min?, max?)
        let x = Tensor::from_slice(&[-1.0_f32, 0.5, 9.0]);
        let most = Tensor::from_slice(&[1.0_f32]);
        let arguments = [Value::Tensor(&x), Value::MaybeTensor(None), Value::MaybeTensor(Some(&most))];
        let [clamped] = call::<1>(c"aten::clamp", c"Tensor", &arguments).unwrap();
        assert_eq!(Vec::<f32>::try_from(&clamped).unwrap(), [-1.0, 0.5, 1.0]);
        let [sums] =
            call::<1>(c"aten::cumsum", c"", &[Value::Tensor(&x), Value::Int(0), Value::MaybeTensor(None)])
                .unwrap();
        assert_eq!(Vec::<f32>::try_from(&sums).unwrap(), [-1.0, -0.5, 8.5]);
        let zero = x.zeros_like();
        let [loss] = call::<1>(
            c"aten::huber_loss",
            c"",
            &[Value::Tensor(&x), Value::Tensor(&zero), Value::Int(2), Value::Float(2.0)],
        )
        .unwrap();
        assert_eq!(f64::try_from(&loss).unwrap(), 0.5 + 0.125 + 2.0 * (9.0 - 1.0));
        let flags = [Value::Tensor(&x), Value::Int(1), Value::Int(0), Value::Bool(false), Value::Bool(true)];
        let [values, indices] = call::<2>(c"aten::topk", c"", &flags).unwrap();
        assert_eq!((f64::try_from(&values).unwrap(), i64::try_from(&indices).unwrap()), (-1.0, 0));
    }

    #[test]
    fn lists_of_tensors_arrive() {
        let (a, b) = (Tensor::from_slice(&[1.0_f32, 2.0]), Tensor::from_slice(&[3.0_f32]));
        let [all] = call(c"aten::cat", c"", &[Value::Tensors(&[&a, &b, &a]), Value::Int(0)]).unwrap();
        assert_eq!(Vec::<f32>::try_from(&all).unwrap(), [1.0, 2.0, 3.0, 1.0, 2.0]);
        let none = call::<1>(c"aten::cat", c"", &[Value::Tensors(&[]), Value::Int(0)]);
        assert!(matches!(none, Err(Error::Operation { .. })));
    }

    #[test]
    fn an_operation_that_is_not_there_is_an_error() {
        let x = Tensor::from_slice(&[1.0_f32]);
        let result = call::<1>(c"aten::no_such_operation", c"", &[Value::Tensor(&x)]);
        assert!(matches!(result, Err(Error::Operation { .. })));
    }
}
