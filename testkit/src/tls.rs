//! A proxy that speaks TLS before a server that does not.

use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::http::exchange;

/// The authority whose certificate the proxy has, for `localhost` and no other name, from 2020 to 2120.
pub const CA: &str = "\
-----BEGIN CERTIFICATE-----
MIIBajCCARGgAwIBAgIBATAKBggqhkjOPQQDAjAcMRowGAYDVQQDDBFkcmlmdGxl
c3MgdGVzdCBjYTAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowHDEa
MBgGA1UEAwwRZHJpZnRsZXNzIHRlc3QgY2EwWTATBgcqhkjOPQIBBggqhkjOPQMB
BwNCAARxUFpRtRFFgjOqq6+GII6Rgie4JvOdzkmnq7diF7oSh3gS8wrbb3dvTybV
CPoGr2JXXYBa2AQgj00qXyZ98LNDo0IwQDAPBgNVHRMBAf8EBTADAQH/MA4GA1Ud
DwEB/wQEAwICBDAdBgNVHQ4EFgQUMoAWLrdBS/MeBv2xGs/al85MocQwCgYIKoZI
zj0EAwIDRwAwRAIgUZMSn/8G+Zsc52ope0rPW+iknFtHP4aGyqXhqoekp0gCIAcv
/ar/r+fymUQscNUnXMmScxgdawsXkiMhQwGTdAXM
-----END CERTIFICATE-----
";

/// Another one.
pub const OTHER_CA: &str = "\
-----BEGIN CERTIFICATE-----
MIIBcjCCARegAwIBAgIBAjAKBggqhkjOPQQDAjAfMR0wGwYDVQQDDBRkcmlmdGxl
c3MgdGVzdCBvdGhlcjAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFow
HzEdMBsGA1UEAwwUZHJpZnRsZXNzIHRlc3Qgb3RoZXIwWTATBgcqhkjOPQIBBggq
hkjOPQMBBwNCAASDZVjTI9GHD0CU+l+HjKUeItXtyZKMJaf7P9VmU087ZEkUiQMi
BHhOsapI61+HDOBQadSike0yU41b9biw03Ogo0IwQDAPBgNVHRMBAf8EBTADAQH/
MA4GA1UdDwEB/wQEAwICBDAdBgNVHQ4EFgQUjyIDU+AB3OhWbqz/7jaa+2iCIZgw
CgYIKoZIzj0EAwIDSQAwRgIhAJ33r0E7EWd17xvaNNirz256DHc+xKrwkcCeCwAQ
YoV1AiEA3rDBtG2mC4Yr3Q1RFjDA5oSJwSznwL27FxvXTdmWavI=
-----END CERTIFICATE-----
";

const CERTIFICATE: &str = "\
-----BEGIN CERTIFICATE-----
MIIBmTCCAT+gAwIBAgIBAzAKBggqhkjOPQQDAjAcMRowGAYDVQQDDBFkcmlmdGxl
c3MgdGVzdCBjYTAgFw0yMDAxMDEwMDAwMDBaGA8yMTIwMDEwMTAwMDAwMFowFDES
MBAGA1UEAwwJbG9jYWxob3N0MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEkUcZ
8A+qj18N13JYOd6Aamkazmt9xCgjNIL6giAjU/LMrRMgaqzT+HAc88opFSD1sdaV
eJ8hb0KvoHX7daBxyqN4MHYwFAYDVR0RBA0wC4IJbG9jYWxob3N0MBMGA1UdJQQM
MAoGCCsGAQUFBwMBMAkGA1UdEwQCMAAwHQYDVR0OBBYEFJwzx+WRydWiRGFBopAx
RQ19FX2zMB8GA1UdIwQYMBaAFDKAFi63QUvzHgb9sRrP2pfOTKHEMAoGCCqGSM49
BAMCA0gAMEUCIQDcX+/cFzDPV6BgOKSVhOnageJXvLlWLi8AZEnEys5ufQIgaGM6
oQKcsvjl7UQu8PywR6ylCW5XIEb5Y4k+vgM91GY=
-----END CERTIFICATE-----
";

/// It opens nothing but this proxy.
const KEY: &str = "\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgZkdhL+AUlCnewqhx
43r26R3SgFVq6CFV6Le6wxgitWKhRANCAASRRxnwD6qPXw3Xclg53oBqaRrOa33E
KCM0gvqCICNT8sytEyBqrNP4cBzzyikVIPWx1pV4nyFvQq+gdft1oHHK
-----END PRIVATE KEY-----
";

/// Starts the proxy, which ends with the process. It takes the calls below the path `prefix` to `server`, without that
/// prefix, and answers others with 404. Returns its port on the loopback address.
pub fn start(server: SocketAddr, prefix: &'static str) -> u16 {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let chain = vec![CertificateDer::from_pem_slice(CERTIFICATE.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(KEY.as_bytes()).unwrap();
    let config = Arc::new(config.with_no_client_auth().with_single_cert(chain, key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let config = config.clone();
            // A client that does not trust the certificate hangs up.
            std::thread::spawn(move || _ = connection.and_then(|tcp| serve(tcp, config, server, prefix)));
        }
    });
    port
}

/// Answers one request, and ends the connection.
fn serve(tcp: TcpStream, config: Arc<ServerConfig>, server: SocketAddr, prefix: &str) -> io::Result<()> {
    let session = ServerConnection::new(config).map_err(io::Error::other)?;
    let mut tls = BufReader::new(StreamOwned::new(session, tcp));
    let (mut head, mut length) = (Vec::new(), 0);
    loop {
        let mut line = String::new();
        tls.read_line(&mut line)?;
        if line.trim().is_empty() {
            break;
        }
        let lower = line.to_ascii_lowercase();
        match lower.strip_prefix("content-length:") {
            Some(value) => length = value.trim().parse().map_err(io::Error::other)?,
            None if lower.starts_with("connection:") || lower.starts_with("host:") => {}
            None => head.push(line),
        }
    }
    let mut body = vec![0; length];
    tls.read_exact(&mut body)?;
    let Some((request, headers)) = head.split_first() else { return Ok(()) };
    let (method, path) = request.split_once(' ').unwrap_or_default();
    let path = path.split(' ').next().and_then(|path| path.strip_prefix(prefix));
    let (status, answer) = match path.filter(|path| path.starts_with('/')) {
        Some(path) => {
            let body = String::from_utf8_lossy(&body);
            exchange(server, &format!("{method} {path}"), &headers.concat(), &body)
        }
        None => (404, String::new()),
    };
    let head =
        format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", answer.len());
    let tls = tls.get_mut();
    tls.write_all(head.as_bytes())?;
    tls.write_all(answer.as_bytes())?;
    tls.conn.send_close_notify();
    tls.flush()
}
