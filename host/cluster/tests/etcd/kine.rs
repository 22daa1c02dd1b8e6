//! A server that answers as kine does: it has a part of etcd's API, and other transactions than
//! etcd's. Its answers are those of kine's source: `pkg/server/limited.go`, `maintenance.go`,
//! `cluster.go`.

use bytes::Bytes;
use h2::server::SendResponse;
use http::{HeaderMap, Response};
use statehouse_cluster::Engine as _;
use statehouse_cluster::etcd::Etcd;
use tokio::net::{TcpListener, TcpStream};

/// The message of an answer, or the text of a refusal.
fn answer(path: &str) -> Result<Vec<u8>, &'static str> {
    let text = |tag: u8, text: &str| [&[tag << 3 | 2, text.len() as u8], text.as_bytes()].concat();
    match path {
        // An empty header and a version of etcd.
        "/etcdserverpb.Maintenance/Status" => Ok([vec![10, 0], text(2, "3.5.13")].concat()),
        "/etcdserverpb.Cluster/MemberList" => {
            let member = text(2, "kine");
            Ok([vec![18, member.len() as u8], member].concat())
        }
        "/etcdserverpb.KV/Range" => Ok(vec![10, 0]),
        "/etcdserverpb.KV/Txn" => Err("unsupported transaction: compare:<...>"),
        _ => Err("it is not supported"),
    }
}

/// Answers the call of this path.
pub(crate) fn send(path: &str, mut respond: SendResponse<Bytes>) {
    let response = Response::builder().header("content-type", "application/grpc");
    let mut stream = respond
        .send_response(response.body(()).unwrap(), false)
        .unwrap();
    let mut trailers = HeaderMap::new();
    match answer(path) {
        Ok(message) => {
            let length = (message.len() as u32).to_be_bytes();
            let frame = [&[0], &length[..], &message].concat();
            stream.send_data(frame.into(), false).unwrap();
            trailers.insert("grpc-status", 0.into());
        }
        // Go gives an error without a code the code "unknown".
        Err(refusal) => {
            trailers.insert("grpc-status", 2.into());
            trailers.insert("grpc-message", refusal.parse().unwrap());
        }
    }
    stream.send_trailers(trailers).unwrap();
}

async fn serve(stream: TcpStream) {
    let mut connection = h2::server::handshake(stream).await.unwrap();
    while let Some(Ok((request, respond))) = connection.accept().await {
        send(request.uri().path(), respond);
    }
}

#[tokio::test]
async fn kine_is_refused_in_words() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    let kine = Etcd::new(&[url], None).unwrap();
    let refused = kine.check().await.unwrap_err().to_string();
    assert!(refused.contains("kine and other substitutes"), "{refused}");
    let findings = kine.examine().await.unwrap();
    let finding = findings[0].to_string();
    assert!(finding.starts_with("FAILURE"), "{finding}");
    assert!(finding.contains("kine and other substitutes"), "{finding}");
}
