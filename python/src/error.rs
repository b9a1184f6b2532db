//! Python's exceptions, made of the crates' errors. The classes are in `python/driftless_rl/_errors.py`.

use driftless::bridge::Error as Bridge;
use driftless::buffer::Error as Buffer;
use driftless::command;
use driftless::store::{Error as Store, chain_text};
use driftless::transport::Error as Transport;
use pyo3::exceptions::{PyException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;

/// What an exception carries beside its text.
#[derive(Default)]
struct Fields<'a> {
    kind: &'a str,
    code: u8,
    retryable: bool,
    tensor: Option<&'a str>,
}

/// An exception of the class `class` of `driftless_rl._errors`.
fn raise(class: &str, text: &str, fields: &Fields<'_>) -> PyErr {
    let made = Python::attach(|py| -> PyResult<PyErr> {
        let values = PyDict::new(py);
        values.set_item("kind", fields.kind)?;
        values.set_item("code", fields.code)?;
        values.set_item("retryable", fields.retryable)?;
        values.set_item("tensor", fields.tensor)?;
        let class = py.import("driftless_rl._errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call((text,), Some(&values))?))
    });
    made.unwrap_or_else(|error| PyRuntimeError::new_err(format!("{text} (and {error})")))
}

/// An error that only exists in Python.
pub(crate) fn own(class: &str, text: impl AsRef<str>) -> PyErr {
    let (kind, retryable) = (class.trim_end_matches("Error"), class == "BusyError");
    raise(class, text.as_ref(), &Fields { kind, code: 1, retryable, tensor: None })
}

/// A tensor that cannot be read.
pub(crate) fn tensor(name: &str, what: &str, expected: &str, found: &str) -> PyErr {
    let text = format!("tensor `{name}`: {what} is {found}, expected {expected}");
    raise("TensorError", &text, &Fields { kind: "Tensor", code: 1, retryable: false, tensor: Some(name) })
}

/// An argument that cannot be.
pub(crate) fn usage(name: &str, expected: &str, found: &str) -> PyErr {
    let text = format!("{name}: expected {expected}, found {found}");
    raise("UsageError", &text, &Fields { kind: "Usage", code: 2, ..Fields::default() })
}

/// The value that an argument names.
pub(crate) fn named<T: Copy>(argument: &str, known: &[(&str, T)], name: &str) -> PyResult<T> {
    let found = known.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names = known.iter().map(|(name, _)| format!("`{name}`")).collect::<Vec<_>>().join(", ");
        let expected = match names.rsplit_once(", ") {
            Some((others, last)) => format!("{others} or {last}"),
            None => names,
        };
        usage(argument, &expected, name)
    })
}

/// A time that an argument has in seconds.
pub(crate) fn seconds(argument: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| usage(argument, "seconds, 0 or more", &seconds.to_string()))
}

pub(crate) fn transport(error: Transport) -> PyErr {
    if let Some(raised) = ends_the_program(&error) {
        return raised;
    }
    let (code, retryable) = (command::transport_code(&error), error.is_retryable());
    let kind = match &error {
        Transport::Store(error) => variant(error),
        error => variant(error),
    };
    let mut text = chain_text(&error);
    if matches!(error, Transport::RunExists { .. }) {
        text += ": `resume=True`, or with PublishCallback `trainer.train(resume_from_checkpoint=True)`, goes on with it";
    }
    let (class, tensor) = (transport_class(&error, code), tensor_of(&error));
    raise(class, &text, &Fields { kind: &kind, code, retryable, tensor })
}

/// What `LazyTensor.read` raised, if that is no `Exception`: Ctrl-C, `sys.exit()`.
fn ends_the_program(error: &Transport) -> Option<PyErr> {
    let Transport::HostCopy { source, .. } = error else { return None };
    let raised = source.downcast_ref::<PyErr>()?;
    Python::attach(|py| (!raised.is_instance_of::<PyException>(py)).then(|| raised.clone_ref(py)))
}

/// An error of the codec on a single tensor.
pub(crate) fn codec(error: driftless::delta::Error) -> PyErr {
    raise(
        "RefusedError",
        &chain_text(&error),
        &Fields { kind: &variant(&error), code: 3, ..Fields::default() },
    )
}

pub(crate) fn buffer(error: Buffer) -> PyErr {
    let code = command::buffer_code(&error);
    let class = match &error {
        Buffer::Locked { .. } => "BusyError",
        Buffer::Invalid { .. } | Buffer::TooLarge { .. } | Buffer::Unsupported { .. } => "UsageError",
        Buffer::Full { .. } => "DeadlineError",
        _ => by_code(code),
    };
    let retryable = matches!(error, Buffer::Locked { .. } | Buffer::Full { .. });
    raise(class, &chain_text(&error), &Fields { kind: &variant(&error), code, retryable, tensor: None })
}

pub(crate) fn bridge(error: Bridge) -> PyErr {
    let code = command::bridge_code(&error);
    let class = match &error {
        Bridge::Address { .. }
        | Bridge::Ca { .. }
        | Bridge::Key { .. }
        | Bridge::Label { .. }
        | Bridge::Request { .. }
        | Bridge::Fleet { .. }
        | Bridge::Config { .. }
        | Bridge::Open { .. }
        | Bridge::Read { .. } => "UsageError",
        Bridge::Closed => "ClosedError",
        _ if code == 4 => "DeadlineError",
        _ => "EngineError",
    };
    raise(
        class,
        &chain_text(&error),
        &Fields { kind: &variant(&error), code, retryable: code == 4, tensor: None },
    )
}

fn transport_class(error: &Transport, code: u8) -> &'static str {
    match error {
        Transport::LayoutChanged { .. } => "LayoutChangedError",
        Transport::NotFinite { .. } => "NotFiniteError",
        Transport::DuplicateTensor { .. }
        | Transport::ChangedWhileRead { .. }
        | Transport::HostCopy { .. }
        | Transport::TensorMismatch { .. } => "TensorError",
        Transport::NoSuchRun { .. }
        | Transport::RunExists { .. }
        | Transport::NoSuchVersion { .. }
        | Transport::LostRace { .. }
        | Transport::PartConflict { .. }
        | Transport::Pieces { .. } => "RunError",
        Transport::BadName { .. }
        | Transport::BadText { .. }
        | Transport::BadFileName { .. }
        | Transport::BadSetting { .. }
        | Transport::TooLarge { .. }
        | Transport::Unsupported { .. } => "UsageError",
        Transport::Busy { .. } => "BusyError",
        Transport::Cancelled { .. } => "CancelledError",
        Transport::Engine { .. } => "EngineError",
        Transport::Store(error) => store_class(error, code),
        _ => by_code(code),
    }
}

fn store_class(error: &Store, code: u8) -> &'static str {
    match error {
        Store::BadKey { .. }
        | Store::BadText { .. }
        | Store::BadSetting { .. }
        | Store::TooLarge { .. }
        | Store::Unsupported { .. } => "UsageError",
        Store::Locked { .. } | Store::Busy { .. } => "BusyError",
        _ => by_code(code),
    }
}

/// The class for an exit code of the command.
fn by_code(code: u8) -> &'static str {
    match code {
        3 => "RefusedError",
        4 => "DeadlineError",
        _ => "StoreError",
    }
}

fn tensor_of(error: &Transport) -> Option<&str> {
    match error {
        Transport::NotFinite { tensor, .. }
        | Transport::DuplicateTensor { tensor }
        | Transport::ChangedWhileRead { tensor }
        | Transport::HostCopy { tensor, .. }
        | Transport::TensorMismatch { tensor, .. }
        | Transport::Codec { tensor, .. }
        | Transport::Pieces { tensor, .. } => Some(tensor),
        _ => None,
    }
}

/// The variant's name, as the crates' documentation has it.
fn variant(error: &impl std::fmt::Debug) -> String {
    format!("{error:?}").chars().take_while(char::is_ascii_alphanumeric).collect()
}
