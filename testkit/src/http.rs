//! HTTP over a plain socket.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// One exchange: status and body of the answer. `request` is a method and a path, `headers` are whole lines; the host is
/// `x` unless they say so.
pub fn exchange(addr: SocketAddr, request: &str, headers: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    // A server that says nothing fails the test.
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let host = if headers.contains("host: ") { String::new() } else { format!("\r\nhost: {addr}") };
    let head = format!("HTTP/1.1{host}\r\nconnection: close");
    let length = body.len();
    let sent = format!("{request} {head}\r\n{headers}content-length: {length}\r\n\r\n{body}");
    // A server may refuse what it has not read to the end, and hang up; what it says is what counts.
    let _ = stream.write_all(sent.as_bytes());
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    (status, answer.split_once("\r\n\r\n").unwrap().1.to_owned())
}
