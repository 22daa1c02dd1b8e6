//! Which role each endpoint of the admin API needs, and which parameters it has.
//!
//! A request to an endpoint that is not in the table must be refused before anything reads it, so
//! that no endpoint is served without a role. A parameter that an endpoint does not have is refused
//! too: it may be a misspelt condition of a change.

use hyper::{Method, StatusCode, Uri};

use super::answer::Refusal;
use super::query;
use statehouse_access::roles::Role::{self, Operate, Read, Ship};

pub(super) struct Endpoint {
    method: Method,
    /// A segment in capitals stands for any segment.
    path: &'static str,
    pub(super) role: Role,
    /// Its parameters; none if it ignores all.
    parameters: Option<&'static [&'static str]>,
}

impl Endpoint {
    /// Refuses parameters that the endpoint does not have, without a value, or given twice.
    pub(super) fn check_parameters(&self, uri: &Uri) -> Result<(), Refusal> {
        self.parameters
            .map_or(Ok(()), |names| query::check(uri, names))
    }
}

const fn endpoint(
    method: Method,
    path: &'static str,
    role: Role,
    parameters: &'static [&'static str],
) -> Endpoint {
    Endpoint {
        method,
        path,
        role,
        parameters: Some(parameters),
    }
}

const REPLAY: &[&str] = &["from", "to", "limit", "max_fuel"];

const ENDPOINTS: &[Endpoint] = &[
    endpoint(Method::POST, "/v1/session", Read, &[]),
    endpoint(Method::GET, "/v1/session", Read, &[]),
    endpoint(Method::DELETE, "/v1/session", Read, &[]),
    endpoint(Method::GET, "/v1/policies", Read, &[]),
    endpoint(Method::POST, "/v1/policies", Ship, &[]),
    endpoint(Method::DELETE, "/v1/policies/WHICH", Operate, &[]),
    endpoint(Method::POST, "/v1/policies/WHICH/promote", Operate, &[]),
    endpoint(Method::POST, "/v1/rollback", Operate, &[]),
    endpoint(Method::GET, "/v1/log", Read, &["from", "policy"]),
    endpoint(Method::GET, "/v1/shadow", Read, &[]),
    endpoint(Method::PUT, "/v1/shadow", Operate, &[]),
    endpoint(Method::DELETE, "/v1/shadow", Operate, &[]),
    endpoint(Method::PUT, "/v1/canary", Operate, &[]),
    endpoint(Method::DELETE, "/v1/canary", Operate, &[]),
    endpoint(Method::PUT, "/v1/routes", Operate, &["prefix"]),
    endpoint(Method::DELETE, "/v1/routes", Operate, &["prefix"]),
    endpoint(Method::POST, "/v1/authz", Read, &[]),
    endpoint(Method::GET, "/v1/usage", Read, &["clients"]),
    endpoint(Method::GET, "/v1/slow", Read, &["from"]),
    endpoint(Method::GET, "/v1/clients", Read, &["clients"]),
    endpoint(Method::DELETE, "/v1/clients", Operate, &["id"]),
    endpoint(Method::DELETE, "/v1/clients/ID", Operate, &[]),
    endpoint(Method::GET, "/v1/events", Read, &["from", "kind"]),
    endpoint(Method::GET, "/v1/overview", Read, &[]),
    endpoint(Method::GET, "/v1/live", Read, &[]),
    endpoint(
        Method::GET,
        "/v1/keys",
        Read,
        &["prefix", "delimiter", "after", "limit"],
    ),
    endpoint(Method::GET, "/v1/key", Read, &["key"]),
    endpoint(
        Method::PUT,
        "/v1/key",
        Operate,
        &["key", "if_version", "px", "fence"],
    ),
    endpoint(
        Method::DELETE,
        "/v1/key",
        Operate,
        &["key", "if_version", "fence"],
    ),
    endpoint(Method::GET, "/v1/changes", Read, &["prefix"]),
    endpoint(Method::GET, "/v1/history", Read, &["key", "limit"]),
    endpoint(Method::GET, "/v1/value", Read, &["key", "as_of"]),
    endpoint(Method::GET, "/v1/replay", Read, REPLAY),
    endpoint(Method::POST, "/v1/replay", Ship, REPLAY),
    endpoint(Method::POST, "/v1/cluster/handover", Operate, &["to"]),
    endpoint(Method::POST, "/v1/cluster/upgrade", Operate, &[]),
    // A scraper may have its own parameters.
    Endpoint {
        method: Method::GET,
        path: "/metrics",
        role: Read,
        parameters: None,
    },
];

/// The endpoint of a request, by the segments of its path as they were sent. A percent-encoded name
/// in it must not match, because other parts compare whole paths without decoding them.
pub(super) fn find(method: &Method, path: &[&str]) -> Result<&'static Endpoint, Refusal> {
    let of_path = ENDPOINTS.iter().filter(|it| matches(it.path, path));
    if of_path.clone().next().is_none() {
        let error = format!("there is no resource at /{}", path.join("/"));
        return Err(Refusal::new(StatusCode::NOT_FOUND, error));
    }
    of_path
        .clone()
        .find(|it| it.method == *method)
        .ok_or_else(|| {
            let allowed = of_path.map(|it| match it.method {
                Method::GET => "GET, HEAD",
                _ => it.method.as_str(),
            });
            let allowed: Vec<&str> = allowed.collect();
            Refusal::method(method, &format!("/{}", path.join("/")), allowed.join(", "))
        })
}

fn matches(pattern: &str, path: &[&str]) -> bool {
    let expected = pattern.split('/').skip(1);
    let fits = |(expected, found): (&str, &&str)| {
        expected == *found || expected.bytes().all(|byte| byte.is_ascii_uppercase())
    };
    expected.clone().count() == path.len() && expected.zip(path).all(fits)
}

/// Whether a request changes the store or its clients. A change of a key and a handover check the
/// leadership themselves.
pub(super) fn acts(method: &Method, path: &[&str]) -> bool {
    let is_act = matches!(
        path,
        [
            "v1",
            "policies" | "rollback" | "shadow" | "canary" | "routes" | "clients",
            ..
        ] | ["v1", "cluster", "upgrade"]
    );
    is_act && !matches!(*method, Method::GET | Method::HEAD)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Method, path and parameters of each endpoint in the documentation of `api.rs`, without those
    /// that need no login.
    fn documented() -> BTreeSet<(String, String, Vec<String>)> {
        let lines = include_str!("api.rs").lines();
        let lines = lines.filter_map(|line| line.strip_prefix("//! "));
        let endpoints = lines.filter_map(|line| {
            let (method, rest) = line.split_once(' ')?;
            let target = rest.trim_start().split(' ').next()?;
            let (path, query) = target.split_once('?').unwrap_or((target, ""));
            let names = query.split('&').filter_map(|it| it.split_once('='));
            let names = names.map(|(name, _)| name.to_owned()).collect();
            let is_method = ["GET", "POST", "PUT", "DELETE"].contains(&method);
            is_method.then(|| (method.to_owned(), path.to_owned(), names))
        });
        endpoints
            .filter(|(_, path, _)| !["/livez", "/readyz", "/"].contains(&&**path))
            .collect()
    }

    #[test]
    fn every_documented_endpoint_has_a_role_and_the_reverse() {
        let table = ENDPOINTS.iter().map(|it| {
            let words: Vec<&str> = it.path.split('/').skip(1).collect();
            let is_found = find(&it.method, &words).is_ok();
            assert!(is_found, "{} {}", it.method, it.path);
            let names = it.parameters.unwrap_or_default();
            let names = names.iter().map(|name| (*name).to_owned()).collect();
            (it.method.to_string(), it.path.to_owned(), names)
        });
        let table: BTreeSet<_> = table.collect();
        assert_eq!(table.len(), ENDPOINTS.len(), "an endpoint has two roles");
        assert_eq!(table, documented());
    }

    #[test]
    fn only_reading_endpoints_need_no_more_than_read() {
        for it in ENDPOINTS {
            let harmless = ["/v1/authz", "/v1/session"].contains(&it.path);
            let changes = it.method != Method::GET && !harmless;
            assert_eq!(changes, it.role > Read, "{} {}", it.method, it.path);
        }
    }

    #[test]
    fn changes_are_acts_unless_they_check_the_leadership_themselves() {
        // A replay changes nothing.
        let others = ["/v1/key", "/v1/cluster/handover", "/v1/replay"];
        for it in ENDPOINTS {
            let words: Vec<&str> = it.path.split('/').skip(1).collect();
            let expected = it.role > Read && !others.contains(&it.path);
            let found = acts(&it.method, &words);
            assert_eq!(found, expected, "{} {}", it.method, it.path);
        }
    }

    /// Otherwise a misspelt condition would let a change happen without it.
    #[test]
    fn unknown_repeated_and_empty_parameters_are_refused() {
        let check = |method: Method, path: &str, query: &str| {
            let uri: Uri = format!("{path}?{query}").parse().unwrap();
            let words: Vec<&str> = path.split('/').skip(1).collect();
            let endpoint = find(&method, &words).unwrap_or_else(|_| panic!("{path}"));
            let checked = endpoint.check_parameters(&uri);
            checked.map_err(|it| (it.status.as_u16(), it.error))
        };
        let put = |query| check(Method::PUT, "/v1/key", query);
        assert_eq!(put("key=k&if_version=none&px=1&fence="), Ok(()));
        assert_eq!(put("key=k&&"), Ok(()));
        for (query, named) in [
            ("key=k&if-version=none", "if-version"),
            ("key=k&if%5Fversion=none", "if%5Fversion"),
            ("key=k&px", "px"),
            ("key=k&px=1&px=2", "px"),
        ] {
            let (status, error) = put(query).unwrap_err();
            assert_eq!(status, 400, "{query}");
            assert!(error.contains(&format!("`{named}`")), "{error}");
        }
        assert!(check(Method::DELETE, "/v1/key", "key=k&px=1").is_err());
        assert!(check(Method::POST, "/v1/rollback", "to=x").is_err());
        assert_eq!(check(Method::GET, "/metrics", "module=a&x"), Ok(()));
    }

    #[test]
    fn a_request_without_an_endpoint_is_refused() {
        let status = |method: Method, path: &[&str]| {
            let refused = find(&method, path).err().expect("no endpoint");
            refused.status.as_u16()
        };
        assert_eq!(status(Method::GET, &["v1", "nothing"]), 404);
        assert_eq!(status(Method::GET, &["v1"]), 404);
        assert_eq!(status(Method::GET, &["v1", "%6Beys"]), 404);
        assert_eq!(status(Method::GET, &["v1", "policies", "a", "b"]), 404);
        let longer = ["v1", "policies", "a", "promote", ""];
        assert_eq!(status(Method::GET, &longer), 404);
        assert_eq!(status(Method::PATCH, &["v1", "policies"]), 405);
        assert_eq!(status(Method::POST, &["metrics"]), 405);
        let promote = ["v1", "policies", "a%2Fb", "promote"];
        let found = find(&Method::POST, &promote).map(|it| it.role);
        assert_eq!(found.ok(), Some(Operate));
    }
}
