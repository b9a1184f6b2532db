//! Engines behind a proxy that speaks TLS and has a path.

use driftless_bridge::engine::Ca;
use driftless_bridge::fleet::FleetOptions;
use driftless_bridge::{
    ClientOptions, Error, Expected, Fleet, GenerateRequest, Keys, Rid, SamplingParams, connect,
};
use driftless_testkit::sglang::{Fake, checkpoint, patient};
use driftless_testkit::tls;
use tokio::runtime::Runtime;

/// An engine, the port of the proxy before it, and the engine's checkpoint.
fn scene() -> (tempfile::TempDir, Fake, u16) {
    let dir = tempfile::tempdir().unwrap();
    let fake = Fake::start(&checkpoint(&dir.path().join("a"), 1, 4));
    let port = tls::start(fake.address, "/base");
    (dir, fake, port)
}

fn trusting(pem: &str) -> ClientOptions {
    patient().with_ca(Ca::from_pem(pem.as_bytes()).unwrap())
}

/// What a call to the address ends with.
fn asked(address: &str, options: ClientOptions) -> Result<(), Error> {
    let engine = connect(address, options).unwrap();
    Runtime::new().unwrap().block_on(engine.label()).map(drop)
}

#[test]
fn fleet_over_tls_below_a_path_generates() {
    let (dir, fake, port) = scene();
    let expected = Expected::from_checkpoint(&dir.path().join("a")).unwrap();
    let addresses = [format!("https://localhost:{port}/base/")];
    let runtime = Runtime::new().unwrap();
    let options = FleetOptions::default()
        .with_calls(patient().deadlines)
        .with_ca(Ca::from_pem(tls::CA.as_bytes()).unwrap());
    let keys = Keys::default();
    let fleet = runtime.block_on(Fleet::attach(&addresses, &keys, &expected, options)).unwrap();
    let sampling = SamplingParams { max_new_tokens: 1, ..SamplingParams::default() };
    let request = GenerateRequest::new(Rid::new(1, 0), vec![1, 2], sampling);
    let generation = runtime.block_on(fleet.generate(request, None)).unwrap();
    assert_eq!(generation.engine, format!("https://localhost:{port}/base"));
    drop(fake);
}

#[test]
fn engine_whose_certificate_does_not_hold_is_not_called() {
    let (_dir, fake, port) = scene();
    for (host, options, word) in [
        ("localhost", trusting(tls::OTHER_CA), "UnknownIssuer"),
        ("localhost", patient(), "UnknownIssuer"),
        ("127.0.0.1", trusting(tls::CA), "not valid for name"),
    ] {
        let error = asked(&format!("https://{host}:{port}/base"), options).unwrap_err();
        let text = driftless_store::chain_text(&error);
        assert!(matches!(error, Error::Unreachable { .. }) && text.contains(word), "{host}: {text}");
    }
    drop(fake);
}

#[test]
fn call_goes_below_the_path_of_its_address() {
    let (_dir, _fake, port) = scene();
    for (path, is_there) in [("/base", true), ("/base/", true), ("", false), ("/other", false)] {
        let asked = asked(&format!("https://localhost:{port}{path}"), trusting(tls::CA));
        match asked {
            Ok(()) => assert!(is_there, "{path}"),
            Err(error) => {
                assert!(!is_there && matches!(error, Error::Status { status: 404, .. }), "{path}: {error}");
            }
        }
    }
}

#[test]
fn ca_that_is_none_is_refused() {
    let damaged = tls::CA.replace("MII", "AAA");
    for pem in ["", "no certificate", "-----BEGIN CERTIFICATE-----\n", damaged.as_str()] {
        assert!(matches!(Ca::from_pem(pem.as_bytes()), Err(Error::Ca { .. })), "{pem:?}");
    }
}
