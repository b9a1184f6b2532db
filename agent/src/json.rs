//! JSON with the members of objects in the order in which they were written: templates render them so.

use std::fmt;
use std::ops::Index;

use indexmap::IndexMap;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Number, Value};

/// A value. Two objects are equal whatever the order of their members.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Json {
    /// `null`.
    #[default]
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number.
    Number(Number),
    /// A text.
    String(String),
    /// A list.
    Array(Vec<Json>),
    /// An object. Of members with the same name the last one is kept, at the place of the first.
    Object(IndexMap<String, Json>),
}

impl Json {
    /// An object of these members.
    #[must_use]
    pub fn object<const N: usize>(members: [(&str, Json); N]) -> Self {
        Json::Object(members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// A member of an object, if it has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.as_object()?.get(key)
    }

    /// A text.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        if let Json::String(text) = self { Some(text) } else { None }
    }

    /// A switch.
    #[must_use]
    pub fn as_bool(&self) -> Option<bool> {
        if let Json::Bool(is) = self { Some(*is) } else { None }
    }

    /// A count.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        if let Json::Number(number) = self { number.as_u64() } else { None }
    }

    /// A list.
    #[must_use]
    pub fn as_array(&self) -> Option<&[Json]> {
        if let Json::Array(elements) = self { Some(elements) } else { None }
    }

    /// The members of an object.
    #[must_use]
    pub fn as_object(&self) -> Option<&IndexMap<String, Json>> {
        if let Json::Object(members) = self { Some(members) } else { None }
    }

    /// Whether it is `null`.
    #[must_use]
    pub fn is_null(&self) -> bool {
        *self == Json::Null
    }

    /// An object with its members in the order that they have in another one; what that one lacks follows.
    #[must_use]
    pub(crate) fn ordered_as(mut self, like: &Json) -> Self {
        if let (Json::Object(members), Some(like)) = (&mut self, like.as_object()) {
            members.sort_by_key(|key, _| like.get_index_of(key).unwrap_or(usize::MAX));
        }
        self
    }
}

impl Index<&str> for Json {
    type Output = Json;

    /// A member; `null` where there is none.
    fn index(&self, key: &str) -> &Json {
        self.get(key).unwrap_or(&Json::Null)
    }
}

impl PartialEq<&str> for Json {
    fn eq(&self, text: &&str) -> bool {
        self.as_str() == Some(text)
    }
}

impl PartialEq<Value> for Json {
    fn eq(&self, value: &Value) -> bool {
        match (self, value) {
            (Json::Null, Value::Null) => true,
            (Json::Bool(one), Value::Bool(other)) => one == other,
            (Json::Number(one), Value::Number(other)) => one == other,
            (Json::String(one), Value::String(other)) => one == other,
            (Json::Array(one), Value::Array(other)) => one == other,
            (Json::Object(one), Value::Object(other)) => {
                one.len() == other.len()
                    && one.iter().all(|(key, value)| other.get(key).is_some_and(|of| value == of))
            }
            _ => false,
        }
    }
}

impl From<&str> for Json {
    fn from(text: &str) -> Self {
        Json::String(text.to_owned())
    }
}

impl From<Value> for Json {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Json::Null,
            Value::Bool(is) => Json::Bool(is),
            Value::Number(number) => Json::Number(number),
            Value::String(text) => Json::String(text),
            Value::Array(elements) => Json::Array(elements.into_iter().map(Json::from).collect()),
            Value::Object(members) => {
                Json::Object(members.into_iter().map(|(key, value)| (key, Json::from(value))).collect())
            }
        }
    }
}

impl fmt::Display for Json {
    /// Without spaces.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Json::Null => serializer.serialize_unit(),
            Json::Bool(is) => serializer.serialize_bool(*is),
            Json::Number(number) => number.serialize(serializer),
            Json::String(text) => serializer.serialize_str(text),
            Json::Array(elements) => serializer.collect_seq(elements),
            Json::Object(members) => serializer.collect_map(members),
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_none<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        Json::deserialize(deserializer)
    }

    fn visit_bool<E>(self, is: bool) -> Result<Json, E> {
        Ok(Json::Bool(is))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Number(number.into()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(Json::Number(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Json, E> {
        Ok(Number::from_f64(number).map_or(Json::Null, Json::Number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::from(text))
    }

    fn visit_string<E>(self, text: String) -> Result<Json, E> {
        Ok(Json::String(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Json, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = from.next_element()? {
            elements.push(element);
        }
        Ok(Json::Array(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Json, A::Error> {
        let mut members = IndexMap::new();
        while let Some((key, value)) = from.next_entry()? {
            members.insert(key, value);
        }
        Ok(Json::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_keep_the_order_in_which_they_were_written() {
        let text = r#"{"z":1,"a":[{"y":null,"b":-2.5}],"é":"\n","m":true}"#;
        let json: Json = serde_json::from_str(text).unwrap();
        assert_eq!(json.to_string(), text);
        assert_eq!(json, serde_json::from_str::<Value>(text).unwrap());
        let twice: Json = serde_json::from_str(r#"{"z":1,"a":2,"z":3}"#).unwrap();
        assert_eq!(twice.to_string(), r#"{"z":3,"a":2}"#, "as a dict of Python has it");
        let like = Json::object([("m", Json::Null), ("z", Json::Null)]);
        assert_eq!(
            json.ordered_as(&like).to_string(),
            r#"{"m":true,"z":1,"a":[{"y":null,"b":-2.5}],"é":"\n"}"#
        );
    }
}
