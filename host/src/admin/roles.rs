//! Which role each endpoint of the admin API needs.
//!
//! A request to an endpoint that is not in the table must be refused before anything reads it, so
//! that no endpoint is served without a role.

use hyper::{Method, StatusCode};

use super::answer::Refusal;
use statehouse_access::roles::Role::{self, Operate, Read, Ship};

/// Method, path and role. A segment in capitals stands for any segment.
const ENDPOINTS: &[(Method, &str, Role)] = &[
    (Method::POST, "/v1/session", Read),
    (Method::GET, "/v1/session", Read),
    (Method::DELETE, "/v1/session", Read),
    (Method::GET, "/v1/policies", Read),
    (Method::POST, "/v1/policies", Ship),
    (Method::DELETE, "/v1/policies/WHICH", Operate),
    (Method::POST, "/v1/policies/WHICH/promote", Operate),
    (Method::POST, "/v1/rollback", Operate),
    (Method::GET, "/v1/log", Read),
    (Method::GET, "/v1/shadow", Read),
    (Method::PUT, "/v1/shadow", Operate),
    (Method::DELETE, "/v1/shadow", Operate),
    (Method::PUT, "/v1/canary", Operate),
    (Method::DELETE, "/v1/canary", Operate),
    (Method::PUT, "/v1/routes", Operate),
    (Method::DELETE, "/v1/routes", Operate),
    (Method::POST, "/v1/authz", Read),
    (Method::GET, "/v1/usage", Read),
    (Method::GET, "/v1/slow", Read),
    (Method::GET, "/v1/clients", Read),
    (Method::DELETE, "/v1/clients", Operate),
    (Method::DELETE, "/v1/clients/ID", Operate),
    (Method::GET, "/v1/events", Read),
    (Method::GET, "/v1/overview", Read),
    (Method::GET, "/v1/live", Read),
    (Method::GET, "/v1/keys", Read),
    (Method::GET, "/v1/key", Read),
    (Method::PUT, "/v1/key", Operate),
    (Method::DELETE, "/v1/key", Operate),
    (Method::GET, "/v1/changes", Read),
    (Method::GET, "/v1/history", Read),
    (Method::GET, "/v1/value", Read),
    (Method::GET, "/v1/replay", Read),
    (Method::POST, "/v1/replay", Ship),
    (Method::POST, "/v1/cluster/handover", Operate),
    (Method::POST, "/v1/cluster/upgrade", Operate),
    (Method::GET, "/metrics", Read),
];

/// The role that a request needs, by its decoded path. Refuses a request without an endpoint.
pub(super) fn required(method: &Method, path: &[&str]) -> Result<Role, Refusal> {
    let mut of_path = ENDPOINTS.iter().filter(|it| matches(it.1, path)).peekable();
    if of_path.peek().is_none() {
        let error = format!("there is no resource at /{}", path.join("/"));
        return Err(Refusal::new(StatusCode::NOT_FOUND, error));
    }
    let of_path: Vec<_> = of_path.collect();
    let found = of_path.iter().find(|it| it.0 == *method);
    found.map(|it| it.2).ok_or_else(|| {
        let allowed: Vec<&str> = of_path.iter().map(|it| it.0.as_str()).collect();
        Refusal::method(method, &format!("/{}", path.join("/")), allowed.join(", "))
    })
}

fn matches(pattern: &str, path: &[&str]) -> bool {
    let mut path = path.iter();
    let fits = |(expected, found): (&str, &&str)| {
        expected == *found || expected.bytes().all(|byte| byte.is_ascii_uppercase())
    };
    let all_fit = pattern.split('/').skip(1).all(|expected| {
        let found = path.next();
        found.is_some_and(|found| fits((expected, found)))
    });
    all_fit && path.next().is_none()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The list of endpoints in the documentation of `api.rs`, without those that need no login.
    fn documented() -> BTreeSet<(String, String)> {
        let lines = include_str!("api.rs").lines();
        let lines = lines.filter_map(|line| line.strip_prefix("//! "));
        let endpoints = lines.filter_map(|line| {
            let (method, rest) = line.split_once(' ')?;
            let path = rest.trim_start().split([' ', '?']).next()?;
            let is_method = ["GET", "POST", "PUT", "DELETE"].contains(&method);
            is_method.then(|| (method.to_owned(), path.to_owned()))
        });
        endpoints
            .filter(|(_, path)| !["/livez", "/readyz", "/"].contains(&&**path))
            .collect()
    }

    #[test]
    fn every_documented_endpoint_has_a_role_and_the_reverse() {
        let table = ENDPOINTS.iter().map(|(method, path, _)| {
            let words: Vec<&str> = path.split('/').skip(1).collect();
            assert!(required(method, &words).is_ok(), "{method} {path}");
            (method.to_string(), (*path).to_owned())
        });
        let table: BTreeSet<_> = table.collect();
        assert_eq!(table.len(), ENDPOINTS.len(), "an endpoint has two roles");
        assert_eq!(table, documented());
    }

    #[test]
    fn only_reading_endpoints_need_no_more_than_read() {
        for (method, path, role) in ENDPOINTS {
            let harmless = ["/v1/authz", "/v1/session"].contains(path);
            let changes = *method != Method::GET && !harmless;
            assert_eq!(changes, *role > Read, "{method} {path}");
        }
    }

    #[test]
    fn a_request_without_an_endpoint_is_refused() {
        let status = |method: Method, path: &[&str]| {
            let refused = required(&method, path).unwrap_err();
            refused.status.as_u16()
        };
        assert_eq!(status(Method::GET, &["v1", "nothing"]), 404);
        assert_eq!(status(Method::GET, &["v1"]), 404);
        assert_eq!(status(Method::GET, &["v1", "policies", "a", "b"]), 404);
        assert_eq!(
            status(Method::GET, &["v1", "policies", "a", "promote", ""]),
            404
        );
        assert_eq!(status(Method::PATCH, &["v1", "policies"]), 405);
        assert_eq!(status(Method::POST, &["metrics"]), 405);
        let promote = ["v1", "policies", "a/b", "promote"];
        assert_eq!(required(&Method::POST, &promote).unwrap(), Operate);
    }
}
