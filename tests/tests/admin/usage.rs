//! Tests `statehouse usage`, which reports how many keys and bytes each client owns.

use serde_json::{Value as Json, json};
use statehouse_tests::{Ran, Server};

fn usage(server: &Server, arguments: &[&str]) -> Ran {
    server.run(&[&["usage"], arguments].concat())
}

#[test]
fn usage_lists_the_largest_owners_first() {
    let server = Server::with_config("max_keys = 100\nmax_client_keys = 60\nmax_bytes = 100000\n");
    let of = |clients: &str| -> Json {
        let text = usage(&server, &["--clients", clients, "--json"]);
        text.code(0).object()
    };
    let empty = of("20");
    assert_eq!(empty["keys"], json!({ "used": 0, "max": 100 }));
    assert_eq!(empty["owners"], 0);
    assert_eq!(empty["clients"], json!([]));

    let mut large = server.store("large");
    let mut many = server.store("many");
    let mut small = server.store("small");
    large.set("large", "v".repeat(10_000));
    for key in ["a", "b", "c"] {
        many.set(key, "value");
    }
    small.set("a", "taken over");
    small.set("gone", "value");
    small.ask(&["DEL", "gone"]);
    drop(small);

    let all = of("20");
    assert_eq!(all["keys"]["used"], 4);
    assert_eq!(all["max_client_keys"], 60);
    assert_eq!(all["owners"], 3);
    let clients = all["clients"].as_array().unwrap();
    let named: Vec<_> = clients
        .iter()
        .map(|it| (it["client"].as_str().unwrap(), it["keys"].as_u64().unwrap()))
        .collect();
    assert_eq!(named, [("large", 1), ("many", 2), ("small", 1)]);
    // Bytes of the key and of the value, plus 128 for each key.
    assert_eq!(clients[0]["bytes"], 5 + 10_000 + 128);
    assert_eq!(clients[1]["bytes"], 2 * (1 + 5 + 128));
    assert_eq!(clients[0]["connected"], true);
    assert_eq!(clients[0]["user"], Json::Null);
    let owners = clients.iter().map(|it| it["bytes"].as_u64().unwrap());
    assert!(all["bytes"]["used"].as_u64().unwrap() > owners.sum());

    let first = of("1");
    assert_eq!(first["owners"], 3);
    assert_eq!(first["clients"], json!([clients[0]]));
    let text = usage(&server, &["--clients", "1"]).code(0).text();
    assert!(text.ends_with("and 2 more, who own less\n"), "{text}");
    let refused = usage(&server, &["--clients", "2001"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("0 to 2000"), "{}", refused.stderr);
}
