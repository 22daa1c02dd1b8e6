//! The resource usage of a process on this machine, and the process that listens at an address.
//! Linux only: it reads /proc. Elsewhere every function returns `None`.

use std::fs;
use std::net::{Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

/// Ticks of /proc per second (proc(5)). Linux uses this number for all programs; it does not depend
/// on the kernel's internal rate.
const TICKS_PER_SECOND: u64 = 100;

/// The resource usage of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Processor time since its start, with a resolution of 10 ms.
    pub cpu: Duration,
    /// Resident memory now, in bytes.
    pub resident: u64,
}

impl Usage {
    /// Reads the usage of a process; `None` if it does not exist or cannot be read.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in brackets, may contain any bytes.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let user: u64 = fields.nth(11)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))?;
        let kib: u64 = resident.split_whitespace().next()?.parse().ok()?;
        Some(Self {
            cpu: Duration::from_millis((user + system) * 1000 / TICKS_PER_SECOND),
            resident: kib << 10,
        })
    }
}

/// The process that listens at an address of this machine, and its name, if this account may read
/// them.
#[must_use]
pub fn listener(address: SocketAddr) -> Option<(u32, String)> {
    let find = |table: &str, address| listening(&fs::read_to_string(table).ok()?, address);
    let socket = match address {
        SocketAddr::V4(_) => find("/proc/net/tcp", address).or_else(|| {
            // A socket of IPv6 at all addresses also accepts connections over IPv4.
            let any = (Ipv6Addr::UNSPECIFIED, address.port());
            find("/proc/net/tcp6", any.into())
        }),
        SocketAddr::V6(_) => find("/proc/net/tcp6", address),
    };
    socket_owner(socket?)
}

/// The process that listens at a Unix socket, by the path at which the socket was created.
pub fn socket_listener(path: &Path) -> Option<(u32, String)> {
    let table = fs::read_to_string("/proc/net/unix").ok()?;
    // The fields: number, references, protocol, flags, type, state, inode, path.
    let inode = table.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (flags, inode) = (fields.nth(3)?, fields.nth(2)?);
        let at = &line[line.find('/')?..];
        let listens = u32::from_str_radix(flags, 16).ok()? & LISTENS != 0;
        (listens && Path::new(at) == path).then(|| inode.parse().ok())?
    });
    socket_owner(inode?)
}

/// The flag of a listening socket (`__SO_ACCEPTCON` of Linux).
const LISTENS: u32 = 0x1_0000;

/// The process that has this socket open, and its name.
fn socket_owner(socket: u64) -> Option<(u32, String)> {
    let socket = format!("socket:[{socket}]");
    for entry in fs::read_dir("/proc").ok()?.map_while(Result::ok) {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else {
            continue;
        };
        let Ok(files) = fs::read_dir(entry.path().join("fd")) else {
            continue;
        };
        let mut links = files
            .map_while(Result::ok)
            .filter_map(|it| fs::read_link(it.path()).ok());
        if links.any(|link| link.as_os_str() == socket.as_str()) {
            let name = fs::read_to_string(entry.path().join("comm")).ok()?;
            return Some((pid, name.trim_end().to_owned()));
        }
    }
    None
}

/// The socket in a table of /proc/net that listens at this address, or at all addresses with its
/// port.
fn listening(table: &str, address: SocketAddr) -> Option<u64> {
    let port = address.port();
    let exact = match address {
        SocketAddr::V4(it) => format!("{:08X}:{port:04X}", u32::from_ne_bytes(it.ip().octets())),
        SocketAddr::V6(it) => {
            let octets = it.ip().octets();
            let words = octets.as_chunks::<4>().0.iter();
            let words: String = words
                .map(|word| format!("{:08X}", u32::from_ne_bytes(*word)))
                .collect();
            format!("{words}:{port:04X}")
        }
    };
    let any = format!("{}:{port:04X}", "0".repeat(exact.len() - 5));
    let find = |wanted: &str| {
        table.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // 0A is LISTEN; the tenth field is the inode.
            let found = fields.get(1) == Some(&wanted) && fields.get(3) == Some(&"0A");
            found.then(|| fields.get(9)?.parse().ok()).flatten()
        })
    };
    find(&exact).or_else(|| find(&any))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn tcp_listener_is_found_by_its_address() {
        for address in ["127.0.0.1:0", "127.9.8.7:0", "0.0.0.0:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let mut address = listener.local_addr().unwrap();
            if address.ip().is_unspecified() {
                address.set_ip([127, 0, 0, 1].into());
            }
            let (pid, name) = super::listener(address).unwrap();
            assert_eq!(pid, std::process::id(), "{name}");
        }
    }

    /// Regression: no process was found.
    #[test]
    fn listener_at_all_addresses_is_found_by_one_of_ipv4() {
        let Ok(socket) = TcpListener::bind("[::]:0") else {
            // This machine has no IPv6.
            return;
        };
        let port = socket.local_addr().unwrap().port();
        let (pid, name) = listener(([127, 0, 0, 1], port).into()).unwrap();
        assert_eq!(pid, std::process::id(), "{name}");
    }

    #[test]
    fn unix_listener_is_found_by_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a socket");
        let listener = UnixListener::bind(&path).unwrap();
        let found = socket_listener(&path).unwrap();
        assert_eq!(found.0, std::process::id(), "{}", found.1);
        assert_eq!(socket_listener(&directory.path().join("a")), None);
        drop(listener);
        assert_eq!(socket_listener(&path), None);
    }

    #[test]
    fn address_without_listener_has_no_process() {
        // The port is in use, but not at this address.
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut address = other.local_addr().unwrap();
        address.set_ip([127, 1, 2, 3].into());
        assert_eq!(listener(address), None);
    }

    #[test]
    fn usage_shows_processor_time_and_memory() {
        let before = Usage::of(std::process::id()).unwrap();
        let end = std::time::Instant::now() + Duration::from_millis(60);
        let mut sum = 0_u64;
        while std::time::Instant::now() < end {
            sum = std::hint::black_box(sum + 1);
        }
        let after = Usage::of(std::process::id()).unwrap();
        assert!(
            after.cpu > before.cpu && after.resident > 1 << 20,
            "{before:?} {after:?}"
        );
        assert_eq!(Usage::of(u32::MAX), None);
    }
}
