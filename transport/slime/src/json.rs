//! JSON objects whose keys must not repeat; the usual map types keep the last of two.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

/// A map that refuses a key that occurs twice.
#[derive(Debug)]
pub(crate) struct Unique<T>(pub(crate) BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Unique<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Entries<T> {
            type Value = Unique<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object without repeated keys")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique<T>, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, T>()? {
                    let text = key.escape_default().to_string();
                    if entries.insert(key, value).is_some() {
                        return Err(A::Error::custom(format_args!("`{text}` occurs twice")));
                    }
                }
                Ok(Unique(entries))
            }
        }

        deserializer.deserialize_map(Entries(PhantomData))
    }
}
