//! From `s3://bucket/prefix` and settings to a backend.

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{ClientConfigKey, RetryConfig};
use url::Url;

use super::service::Connector;
use super::{Backend, Bucket, Limits};
use crate::error::{Error, Result};
use crate::key::Key;
use crate::store::redact;

/// What may stand behind the `?` of a URL. Secrets may not: URLs end up in process lists and logs.
const PARAMETERS: [&str; 4] = ["account", "endpoint", "region", "virtual_hosted_style_request"];

const EXPECTED: &str =
    "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix, with ?endpoint=, &region= or &account=";

/// A URL taken apart.
struct Place {
    scheme: String,
    bucket: String,
    /// Without slashes around it; may be empty.
    prefix: String,
    parameters: Vec<(String, String)>,
}

/// Opens the store that `url` names. `settings` are pairs as in the environment (`AWS_REGION` and so on);
/// those of the URL go before them.
pub(crate) fn open(url: &str, settings: &[(String, String)]) -> Result<Bucket> {
    let mut place = Place::parse(url)?;
    let mut all: Vec<(String, String)> =
        settings.iter().map(|(name, value)| (name.to_ascii_lowercase(), value.clone())).collect();
    for (name, value) in &place.parameters {
        let name = match (place.scheme.as_str(), name.as_str()) {
            ("az", "account") => "azure_storage_account_name",
            ("az", "endpoint") => "azure_storage_endpoint",
            ("gs", "endpoint") => "google_base_url",
            ("s3", "endpoint") => "aws_endpoint_url_s3",
            (_, name) => name,
        };
        all.push((name.to_owned(), value.clone()));
    }
    let backend = place.backend(&all)?;
    Bucket::new(backend, &place.prefix, place.to_string(), Limits::default())
}

/// A builder with the settings that it knows.
macro_rules! configured {
    ($builder:ty, $key:ty, $settings:expr) => {
        $settings.iter().fold(<$builder>::new(), |builder, (name, value)| match name.parse::<$key>() {
            Ok(key) => builder.with_config(key, value),
            Err(_) => builder,
        })
    };
}

/// The backend of a builder; plain HTTP only for an endpoint that is written so, no deadlines and retries but
/// ours.
macro_rules! built {
    ($builder:expr, $key:ident, $endpoint:expr) => {{
        let mut builder = $builder.with_config($key::Client(ClientConfigKey::ConnectTimeout), "10 seconds");
        if $endpoint.is_some_and(|endpoint| endpoint.starts_with("http://")) {
            builder = builder.with_config($key::Client(ClientConfigKey::AllowHttp), "true");
        }
        let retry = RetryConfig { max_retries: 0, ..RetryConfig::default() };
        let built = builder.with_retry(retry).with_http_connector(Connector).build();
        let built = built.map_err(|source| Error::BadSetting {
            name: "store",
            expected: "a whole description: bucket, endpoint or region, credentials".to_owned(),
            found: super::cause(&source).text,
        })?;
        Ok(Box::new(built) as Box<dyn Backend>)
    }};
}

impl Place {
    fn parse(text: &str) -> Result<Self> {
        let bad = || Error::BadText { what: "store URL", text: redact(text), expected: EXPECTED };
        let url = Url::parse(text).map_err(|_| bad())?;
        let bucket = url.host_str().filter(|host| !host.is_empty()).ok_or_else(bad)?.to_owned();
        if !url.username().is_empty() || url.password().is_some() || url.port().is_some() {
            return Err(bad());
        }
        let mut parameters = Vec::new();
        for (name, value) in url.query_pairs() {
            if !PARAMETERS.contains(&name.as_ref()) || value.contains(['@', '?']) {
                return Err(bad());
            }
            parameters.push((name.into_owned(), value.into_owned()));
        }
        let prefix = url.path().trim_matches('/').to_owned();
        if !prefix.is_empty() {
            Key::new(&prefix)?;
        }
        Ok(Self { scheme: url.scheme().to_owned(), bucket, prefix, parameters })
    }

    /// The backend. What the settings say about where it is becomes part of the URL.
    fn backend(&mut self, settings: &[(String, String)]) -> Result<Box<dyn Backend>> {
        match self.scheme.as_str() {
            "s3" => {
                let mut builder = configured!(AmazonS3Builder, AmazonS3ConfigKey, settings);
                let service = builder.get_config_value(&AmazonS3ConfigKey::S3Endpoint);
                let endpoint = service.or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint));
                self.note("endpoint", endpoint.as_deref());
                // One request each: some servers have no other.
                builder = builder.with_config(AmazonS3ConfigKey::DisableBulkDelete, "true");
                built!(builder.with_bucket_name(&self.bucket), AmazonS3ConfigKey, endpoint)
            }
            "az" => {
                let builder = configured!(MicrosoftAzureBuilder, AzureConfigKey, settings);
                let endpoint = builder.get_config_value(&AzureConfigKey::Endpoint);
                self.note("endpoint", endpoint.as_deref());
                self.note("account", builder.get_config_value(&AzureConfigKey::AccountName).as_deref());
                built!(builder.with_container_name(&self.bucket), AzureConfigKey, endpoint)
            }
            "gs" => {
                let builder = configured!(GoogleCloudStorageBuilder, GoogleConfigKey, settings);
                let endpoint = builder.get_config_value(&GoogleConfigKey::BaseUrl);
                self.note("endpoint", endpoint.as_deref());
                built!(builder.with_bucket_name(&self.bucket), GoogleConfigKey, endpoint)
            }
            scheme => Err(Error::Unsupported {
                what: format!("a store with the scheme `{scheme}`"),
                hint: format!("use {EXPECTED}, file:///absolute/dir, or a plain path"),
            }),
        }
    }

    fn note(&mut self, parameter: &str, value: Option<&str>) {
        if let (Some(value), false) = (value, self.parameters.iter().any(|(name, _)| name == parameter)) {
            self.parameters.push((parameter.to_owned(), redact(value)));
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://{}", self.scheme, self.bucket)?;
        if !self.prefix.is_empty() {
            write!(f, "/{}", self.prefix)?;
        }
        for (index, (name, value)) in self.parameters.iter().enumerate() {
            write!(f, "{}{name}={value}", if index == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}
