//! TLS and WebSocket clients through a follower, which passes their bytes on to the leader.

use statehouse_tests::{Cluster, run};

use crate::{SHORT_LEASE, authority::Authority};

#[test]
fn tls_and_websocket_clients_are_served_through_a_follower() {
    let files = tempfile::tempdir().unwrap();
    let authority = Authority::new(files.path(), "ca");
    let pair = authority.server("server");
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let (certificate, key) = (text(&pair.certificate), text(&pair.key));
    let ca = text(&authority.certificate);
    let schemes = ["mqtts", "ws", "wss"];
    let listeners = schemes.map(|scheme| format!("{scheme}://127.0.0.1:0"));
    let mut arguments = vec!["--tls-cert", &certificate, "--tls-key", &key];
    for listener in &listeners {
        arguments.extend(["--listen", listener]);
    }
    let mut cluster = Cluster::with_arguments(2, 1, &[SHORT_LEASE], &arguments);
    let check = |cluster: &Cluster, host: usize, round: &str| {
        let addresses = cluster[host].addresses();
        for (scheme, address) in schemes.iter().zip(&addresses[1..]) {
            let url = format!("{scheme}://{address}");
            let mut trust = vec!["--url", &url];
            if scheme.ends_with('s') && *scheme != "ws" {
                trust.extend(["--ca", &ca]);
            }
            // Too long for one packet of TLS or one frame.
            let value = format!("{round} {scheme} {}", "v".repeat(100_000));
            let set = [&["set", "key"], &trust[..]].concat();
            run(&set, value.as_bytes()).code(0);
            let got = run(&[&["get", "key"], &trust[..]].concat(), b"").code(0);
            assert!(got.stdout == value.as_bytes(), "{url}: {got:?}");
        }
    };
    check(&cluster, cluster.follower(), "follower");
    check(&cluster, cluster.present_leader().host, "leader");
    let (old, _) = cluster.fail_over();
    cluster[old.host].restart();
    check(&cluster, old.host, "restarted");
}
