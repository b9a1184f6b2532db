//! Signatures of manifests and parts, so that write access to a store gives no control over the fleet.
//!
//! A signed document is a JSON object whose last member is `signatures`. The signature covers all other
//! members, and the run, the model and the version that the document is for. A document therefore cannot
//! replace another. Readers that trust keys parse exactly the bytes that were signed.

use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::str::FromStr;
use std::{fmt, fs};

use driftless_store::os::regular;
use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use rand::TryRngCore as _;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ids::{RunId, Version};

/// Begins every message that is signed.
const DOMAIN: &[u8] = b"driftless signature 1\0";
/// Separates what is signed from the signatures.
const MARKER: &[u8] = b",\"signatures\":[";
/// A document with more signatures than this is taken for unsigned.
const SIGNATURES_MAX: usize = 16;
/// First word of the line that a secret key's file consists of.
const SECRET: &str = "driftless-sign-key-1";
/// First word of the line of a public key.
const PUBLIC: &str = "driftless-trust-key-1";
/// Key files have one line or a few; more bytes are not read.
const KEY_FILE_BYTES_MAX: u64 = 1 << 16;

/// A key that signs publications (ed25519, RFC 8032). No log, no error and no `Debug` shows it.
#[derive(Clone)]
pub struct SignKey(SigningKey);

impl fmt::Debug for SignKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SignKey").field(&self.public()).finish()
    }
}

impl SignKey {
    /// Makes a key from the operating system's randomness and writes it to `path`, which only its owner may
    /// read.
    ///
    /// # Errors
    /// [`Io`](driftless_store::Error::Io) if the file exists already; the file system's errors.
    pub fn create(path: &Path) -> Result<Self> {
        let mut secret = [0; 32];
        let drawn = rand::rngs::OsRng.try_fill_bytes(&mut secret);
        drawn.map_err(|error| Error::io("draw randomness for", path, io::Error::other(error)))?;
        let key = Self::from_bytes(secret);
        let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        file.and_then(|mut file| {
            writeln!(file, "{SECRET} {}", hex::encode(key.0.to_bytes()))?;
            file.sync_all()
        })
        .map_err(|source| Error::io("create", path, source))?;
        Ok(key)
    }

    /// Reads a file that [`SignKey::create`] wrote.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for a file that others than its owner may read, or that holds no key; the file
    /// system's errors.
    pub fn read(path: &Path) -> Result<Self> {
        let text = read_text(path)?;
        let metadata = fs::metadata(path).map_err(|source| Error::io("inspect", path, source))?;
        let bad = |expected: &str, found: String| {
            let found = format!("`{}`, {found}", path.display());
            Error::BadSetting { name: "sign key", expected: expected.to_owned(), found }
        };
        if metadata.mode() & 0o077 != 0 {
            let found = format!("which has the mode {:03o}", metadata.mode() & 0o777);
            return Err(bad("a file that only its owner may read (chmod 600)", found));
        }
        // The error does not quote the file: it may hold a key in another form.
        let key = text.trim().strip_prefix(SECRET).and_then(|rest| decode(rest.trim()));
        key.map(Self::from_bytes).ok_or_else(|| {
            bad(&format!("one line `{SECRET} <64 hex digits>`"), "which holds something else".to_owned())
        })
    }

    /// The key with these secret bytes.
    #[must_use]
    pub fn from_bytes(secret: [u8; 32]) -> Self {
        Self(SigningKey::from_bytes(&secret))
    }

    /// The key that readers trust.
    #[must_use]
    pub fn public(&self) -> TrustKey {
        TrustKey(self.0.verifying_key())
    }

    /// Appends this key's signature to a JSON object.
    pub(crate) fn sign(&self, mut document: Vec<u8>, place: &Subject<'_>) -> Vec<u8> {
        let signature = self.0.sign(&place.message(&document));
        let entry = Entry {
            key: hex::encode(self.public().0.as_bytes()),
            signature: hex::encode(signature.to_bytes()),
        };
        document.truncate(document.len().saturating_sub(1));
        document.extend_from_slice(&suffix(&[entry]));
        document
    }
}

/// A key whose signatures a reader trusts: `driftless-trust-key-1 <64 hex digits>`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TrustKey(VerifyingKey);

impl TrustKey {
    /// Reads a file of public keys, one a line; empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// [`Error::BadText`] for a line that is no key; [`Error::BadSetting`] for a file without any; the file
    /// system's errors.
    pub fn read_all(path: &Path) -> Result<Vec<Self>> {
        let text = read_text(path)?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let keys = lines.map(str::parse).collect::<Result<Vec<Self>>>()?;
        if keys.is_empty() {
            return Err(Error::BadSetting {
                name: "trust key",
                expected: format!("lines `{PUBLIC} <64 hex digits>`"),
                found: format!("`{}`, which has none", path.display()),
            });
        }
        Ok(keys)
    }
}

impl fmt::Display for TrustKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PUBLIC} {}", hex::encode(self.0.as_bytes()))
    }
}

impl fmt::Debug for TrustKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for TrustKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let key = text.strip_prefix(PUBLIC).and_then(|rest| decode(rest.trim()));
        let key = key.and_then(|bytes| VerifyingKey::from_bytes(&bytes).ok()).filter(|key| !key.is_weak());
        // The error does not quote the text: it may be a secret key in the wrong file.
        key.map(Self).ok_or_else(|| Error::BadText {
            what: "trust key",
            text: format!("a line of {} characters", text.len()),
            expected: "driftless-trust-key-1 and 64 lower-case hex digits",
        })
    }
}

/// Decodes hex digits; only lower case is accepted, so that each key has one spelling.
fn decode<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let lower = text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    (lower && hex::decode_to_slice(text, &mut bytes).is_ok()).then_some(bytes)
}

fn read_text(path: &Path) -> Result<String> {
    let read = || {
        let file = regular::open_or_pipe(path)?;
        io::read_to_string(io::Read::take(file, KEY_FILE_BYTES_MAX))
    };
    read().map_err(|source| Error::io("read", path, source))
}

/// The kind of a document and the version that it is for. Signatures cover it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    /// `manifest` or `part`.
    pub(crate) what: &'static str,
    /// The run's name, which the document does not hold. A name that points to another run is noticed by it.
    pub(crate) run: &'a str,
    pub(crate) run_id: RunId,
    pub(crate) model: &'a str,
    pub(crate) version: Version,
}

impl Subject<'_> {
    fn message(&self, document: &[u8]) -> Vec<u8> {
        let mut message = DOMAIN.to_vec();
        let mut text = |text: &str| {
            message.extend_from_slice(&(text.len() as u32).to_le_bytes());
            message.extend_from_slice(text.as_bytes());
        };
        for part in [self.what, self.run, self.model] {
            text(part);
        }
        message.extend_from_slice(self.run_id.as_bytes());
        message.extend_from_slice(&self.version.0.to_le_bytes());
        message.extend_from_slice(blake3::hash(document).as_bytes());
        message
    }
}

/// One signature, as the document holds it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    key: String,
    signature: String,
}

/// The bytes behind the signed ones. They end in the brace that the signed document lost.
fn suffix(entries: &[Entry]) -> Vec<u8> {
    let mut bytes = MARKER.to_vec();
    for (number, Entry { key, signature }) in entries.iter().enumerate() {
        let comma = if number == 0 { "" } else { "," };
        bytes.extend_from_slice(
            format!("{comma}{{\"key\":\"{key}\",\"signature\":\"{signature}\"}}").as_bytes(),
        );
    }
    bytes.extend_from_slice(b"]}");
    bytes
}

/// Bytes that a signature adds to a document.
pub(crate) fn signature_bytes() -> u64 {
    let entry = Entry { key: "0".repeat(64), signature: "0".repeat(128) };
    suffix(&[entry]).len() as u64 - 1
}

/// The signed document and its signatures; `None` if `bytes` do not end in signatures as they are written.
fn split(bytes: &[u8]) -> Option<(Vec<u8>, Vec<Entry>)> {
    let position = bytes.windows(MARKER.len()).rposition(|window| window == MARKER)?;
    let (document, tail) = bytes.split_at(position);
    let list = tail.get(MARKER.len() - 1..tail.len().checked_sub(1)?)?;
    let entries: Vec<Entry> = serde_json::from_slice(list).ok()?;
    // The signatures must have the one spelling that we write, so that no other bytes follow the document.
    if entries.len() > SIGNATURES_MAX || suffix(&entries) != tail {
        return None;
    }
    Some(([document, b"}"].concat(), entries))
}

/// The bytes that a trusted key has signed for this place; `subject` names the document in errors.
///
/// # Errors
/// [`Error::Unsigned`] if no trusted key claims to have signed it; [`Error::BadSignature`] if one does and
/// has not.
pub(crate) fn verify(
    bytes: &[u8],
    trusted: &[TrustKey],
    place: &Subject<'_>,
    subject: &str,
) -> Result<Vec<u8>> {
    let (document, entries) = split(bytes).unwrap_or_default();
    let claims = entries.iter().filter_map(|entry| {
        let key = decode::<32>(&entry.key)?;
        let key = trusted.iter().find(|trusted| *trusted.0.as_bytes() == key)?;
        Some((key, entry))
    });
    let message = place.message(&document);
    let mut forged = None;
    for (key, entry) in claims {
        let signature = decode(&entry.signature).map(|bytes| Signature::from_bytes(&bytes));
        if signature.is_some_and(|signature| key.0.verify_strict(&message, &signature).is_ok()) {
            return Ok(document);
        }
        forged = Some(Box::new(*key));
    }
    let subject = subject.to_owned();
    match forged {
        Some(key) => Err(Error::BadSignature { subject, key }),
        None => {
            // Text that is not hex names no key, and the error does not quote it.
            let keys = entries.iter().filter(|entry| decode::<32>(&entry.key).is_some());
            Err(Error::Unsigned { subject, signers: keys.map(|entry| entry.key.clone()).collect() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCUMENT: &[u8] = br#"{"format":1,"model":"policy","version":3}"#;

    fn place() -> Subject<'static> {
        let run_id = RunId::from_bytes([7; 16]);
        Subject { what: "manifest", run: "my-run", run_id, model: "policy", version: Version(3) }
    }

    /// What `docs/format/publication.md` describes, made without this module: the message by hand, the
    /// signature by OpenSSL 3.0 (`pkeyutl -sign -rawin`) from the secret bytes 0 to 31.
    #[test]
    fn signatures_are_those_of_the_format() {
        let secret: [u8; 32] = std::array::from_fn(|i| i as u8);
        let key = SignKey::from_bytes(secret);
        let mut message =
            b"driftless signature 1\0\x08\0\0\0manifest\x06\0\0\0my-run\x06\0\0\0policy".to_vec();
        message.extend([7; 16]);
        message.extend(*b"\x03\0\0\0\0\0\0\0");
        message
            .extend(hex::decode("3e2453dffaa3fd2d2763fc1e790116cbe9a5374174550ba2489bd5b0e4b06cb6").unwrap());
        assert_eq!(place().message(DOCUMENT), message);
        let expected = concat!(
            r#"{"format":1,"model":"policy","version":3,"signatures":[{"#,
            r#""key":"03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8","signature":""#,
            "345aad44134b3b6a72b33459272d8e4f88a7968077f3cc9bd0c94aa4d0e62f20",
            "1caf74c29bb55aeb99d5b8eb31bbc5ef51404eefdb36ff9e1842140950f20605",
            r#""}]}"#
        );
        let signed = key.sign(DOCUMENT.to_vec(), &place());
        assert_eq!(String::from_utf8(signed.clone()).unwrap(), expected);
        assert_eq!(signed.len() as u64, DOCUMENT.len() as u64 + signature_bytes());
        assert_eq!(verify(&signed, &[key.public()], &place(), "x").unwrap(), DOCUMENT);
    }

    #[test]
    fn no_document_stands_in_anothers_place() {
        let key = SignKey::from_bytes([1; 32]);
        let other = SignKey::from_bytes([2; 32]);
        let signed = key.sign(DOCUMENT.to_vec(), &place());
        let check =
            |bytes: &[u8], place: &Subject<'_>| verify(bytes, &[other.public(), key.public()], place, "x");
        check(&signed, &place()).unwrap();
        for elsewhere in [
            Subject { what: "part", ..place() },
            Subject { run: "my-ru", ..place() },
            Subject { run_id: RunId::from_bytes([8; 16]), ..place() },
            Subject { model: "policy2", ..place() },
            Subject { version: Version(4), ..place() },
            // The same letters, divided differently.
            Subject { run: "my-runp", model: "olicy", ..place() },
        ] {
            let found = check(&signed, &elsewhere);
            assert!(matches!(found, Err(Error::BadSignature { .. })), "{elsewhere:?}: {found:?}");
        }
        let unsigned = verify(DOCUMENT, &[key.public()], &place(), "x");
        assert!(
            matches!(unsigned, Err(Error::Unsigned { ref signers, .. }) if signers.is_empty()),
            "{unsigned:?}"
        );
        let foreign = verify(&signed, &[other.public()], &place(), "x");
        assert!(
            matches!(foreign, Err(Error::Unsigned { ref signers, .. }) if signers.len() == 1),
            "{foreign:?}"
        );
        // Either of several signatures will do.
        let (document, mut entries) = split(&signed).unwrap();
        entries.extend(split(&other.sign(document.clone(), &place())).unwrap().1);
        let both = [&document[..document.len() - 1], &suffix(&entries)].concat();
        for key in [key.public(), other.public()] {
            assert_eq!(verify(&both, &[key], &place(), "x").unwrap(), document);
        }
    }

    #[test]
    fn not_a_byte_can_be_changed() {
        let key = SignKey::from_bytes([1; 32]);
        let signed = key.sign(DOCUMENT.to_vec(), &place());
        for at in 0..signed.len() {
            for bit in 0..8 {
                let mut bytes = signed.clone();
                bytes[at] ^= 1 << bit;
                let found = verify(&bytes, &[key.public()], &place(), "x");
                assert!(
                    matches!(found, Err(Error::BadSignature { .. } | Error::Unsigned { .. })),
                    "bit {bit} of byte {at}: {found:?}"
                );
            }
            assert!(verify(&signed[..at], &[key.public()], &place(), "x").is_err(), "cut at {at}");
        }
        let spaced = String::from_utf8(signed.clone()).unwrap().replace("]}", "] }");
        assert!(verify(spaced.as_bytes(), &[key.public()], &place(), "x").is_err());
        let more = String::from_utf8(signed).unwrap().replace("]}", "],\"version\":9}");
        assert!(verify(more.as_bytes(), &[key.public()], &place(), "x").is_err());
    }

    #[test]
    fn keys_are_kept_and_shown_only_where_they_may_be() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let key = SignKey::create(&path).unwrap();
        assert!(SignKey::create(&path).is_err(), "a key is never replaced");
        assert_eq!(SignKey::read(&path).unwrap().public(), key.public());
        let secret = hex::encode(key.0.to_bytes());
        assert!(fs::read_to_string(&path).unwrap().contains(&secret));
        assert!(!format!("{key:?}").contains(&secret));
        assert_eq!(key.public().to_string().parse::<TrustKey>().unwrap(), key.public());
        // A secret key where a public one belongs, and the other way round: refused, and not repeated.
        let error = TrustKey::read_all(&path).unwrap_err();
        assert!(matches!(error, Error::BadText { .. }) && !error.to_string().contains(&secret), "{error}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(SignKey::read(&path).unwrap_err().to_string().contains("640"));
        let public = dir.path().join("public");
        fs::write(&public, format!("# trainer\n\n{}\n", key.public())).unwrap();
        assert_eq!(TrustKey::read_all(&public).unwrap(), [key.public()]);
        fs::set_permissions(&public, fs::Permissions::from_mode(0o600)).unwrap();
        assert!(matches!(SignKey::read(&public), Err(Error::BadSetting { .. })));
        fs::write(&public, "# nothing\n").unwrap();
        assert!(matches!(TrustKey::read_all(&public), Err(Error::BadSetting { .. })));
    }
}
