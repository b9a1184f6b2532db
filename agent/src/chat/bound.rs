//! What a template may keep in its variables. Values within values without an end overflow the stack when they
//! are written, compared or dropped, and lists that double need no instructions to do so: both end the process.

use minijinja::value::ValueKind;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use regex::{Captures, Regex};

use super::json::DEPTH_MAX;
use super::text::TEXT_BYTES_MAX;

/// Elements that a list or a map may have.
const LENGTH_MAX: usize = 1_000_000;
/// Elements that are looked at in a rendering, which is seconds.
const ELEMENTS_MAX: usize = 5_000_000;
/// Name of the filter that looks at a value, and of the number of elements that it may still look at.
const BOUNDED: &str = "driftless_bounded";
/// What the engine's namespaces are called. Only they can be changed, and so hold themselves.
const NAMESPACE: &str = "::Namespace";

/// The template with each value that it sets sent through the filter.
pub(super) fn bounded(source: &str) -> String {
    // Comments, raw text, expressions and other tags are passed over as they are.
    let code = r#"(?:"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|[^"'])*?"#;
    let raw = r"\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw";
    let set = r"(\{%[-+]?\s*set\s)([\w\s.,()]+)=";
    let parts = format!(r"(?s)\{{#.*?#\}}|{raw}|\{{\{{{code}\}}\}}|{set}({code})([-+]?%\}})|\{{%{code}%\}}");
    let Ok(parts) = Regex::new(&parts) else { return source.to_owned() };
    let replaced = |part: &Captures<'_>| {
        if part.get(1).is_none() {
            return part[0].to_owned();
        }
        let (open, target, value, close) = (&part[1], &part[2], &part[3], &part[4]);
        let is_attribute = target.contains('.');
        format!("{open}{target}=({value})|{BOUNDED}({is_attribute}){close}")
    };
    parts.replace_all(source, replaced).into_owned()
}

/// Adds the filter.
pub(super) fn add_filter(environment: &mut Environment<'_>) {
    environment.add_filter(BOUNDED, |state: &mut State, value: Value, is_attribute: bool| {
        if value.as_str().is_some_and(|text| text.len() > TEXT_BYTES_MAX) {
            let what = format!("it sets a text of more than {TEXT_BYTES_MAX} bytes");
            return Err(Error::new(ErrorKind::InvalidOperation, what));
        }
        let left = state.get_temp(BOUNDED).and_then(|left| left.as_usize()).unwrap_or(ELEMENTS_MAX);
        let left = look(&value, 0, is_attribute, left)?;
        let (value, left) = listed(value, left)?;
        state.set_temp(BOUNDED, Value::from(left));
        Ok::<_, Error>(value)
    });
}

/// The value; as a list where it would be computed anew from other values at each use, as a slice of a slice is.
fn listed(value: Value, left: usize) -> Result<(Value, usize), Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok((value, left));
    }
    let elements: Vec<Value> = value.try_iter()?.take(left.min(LENGTH_MAX) + 1).collect();
    match left.checked_sub(elements.len()).filter(|_| elements.len() <= LENGTH_MAX) {
        Some(left) => Ok((elements.into(), left)),
        None => Err(too_many()),
    }
}

fn too_many() -> Error {
    let most = format!("{LENGTH_MAX} elements, or {ELEMENTS_MAX} in all");
    Error::new(ErrorKind::InvalidOperation, format!("it sets lists or maps of more than {most}"))
}

/// Looks at all of a value; answers how many elements may still be looked at.
fn look(value: &Value, depth: usize, is_attribute: bool, mut left: usize) -> Result<usize, Error> {
    let refused = |what: String| Err(Error::new(ErrorKind::InvalidOperation, what));
    let Some(object) = value.as_object() else { return Ok(left) };
    if is_attribute && object.type_name().ends_with(NAMESPACE) {
        return refused("it sets a namespace within a namespace".to_owned());
    }
    if depth > DEPTH_MAX {
        return refused(format!("it sets lists or maps of more than {DEPTH_MAX} levels"));
    }
    // What has no length can be gone through once only.
    let Some(count) = object.enumerator_len() else { return Ok(left) };
    left = left.checked_sub(count).filter(|_| count <= LENGTH_MAX).ok_or_else(too_many)?;
    for (_, element) in object.try_iter_pairs().into_iter().flatten() {
        left = look(&element, depth + 1, is_attribute, left)?;
    }
    Ok(left)
}
