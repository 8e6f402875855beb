//! What goes wrong between the pool and Postgres, at a chosen message and never by time.
//!
//! The proxy reads the protocol as far as it must: messages are a type of one byte and a length, the ones
//! before the start-up a length only. What the client sends up to a Sync, or one simple query, is a
//! request; it goes by the text of its SQL. The server answers requests in their order, each answer up to
//! a ReadyForQuery.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use tokio::sync::watch;

use super::PATIENCE;

/// What happens to a request, or to its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Do {
    /// The request does not arrive; the connection is cut.
    CutRequest,
    /// It arrives and is carried out; its answer does not arrive, and the connection is cut.
    CutAnswer,
    /// It arrives and is carried out, and its answer is lost; the connection stays.
    SwallowAnswer,
    /// It is held up until the test lets it go.
    HoldRequest,
    /// It is carried out, and its answer is held up until the test lets it go.
    HoldAnswer,
    /// It is carried out, and its own transaction stays open until the test lets it go.
    HoldSync,
}

struct Rule {
    sql: String,
    what: Do,
    /// Whether the store is away for everybody from then on.
    leaves: bool,
    came: watch::Sender<bool>,
    go: watch::Sender<bool>,
}

#[derive(Default)]
struct Shared {
    rules: Mutex<Vec<Arc<Rule>>>,
    rewrites: Mutex<Vec<(String, String)>>,
    rewritten: AtomicBool,
    away: AtomicBool,
    sockets: Mutex<Vec<TcpStream>>,
}

pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// Something that will happen once.
pub struct Mishap(Arc<Rule>);

impl Mishap {
    /// Until it has: for an answer, until the server has given all of it.
    pub async fn happened(&self) {
        let mut came = self.0.came.subscribe();
        let waited = tokio::time::timeout(PATIENCE, came.wait_for(|came| *came)).await;
        assert!(waited.is_ok(), "`{}` should have come by", self.0.sql);
    }

    pub fn has_happened(&self) -> bool {
        *self.0.came.borrow()
    }

    /// Lets go what is held up.
    pub fn let_go(&self) {
        self.0.go.send_replace(true);
    }
}

impl Proxy {
    /// In front of the server of `url`.
    pub fn before(url: &str) -> Self {
        let upstream = authority(url).parse().unwrap();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let proxy = Self { address: listener.local_addr().unwrap(), shared: Arc::default() };
        let shared = Arc::clone(&proxy.shared);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if !shared.away.load(Ordering::SeqCst) {
                    let _ = Line::open(client, upstream, &shared);
                }
            }
        });
        proxy
    }

    /// `url` by way of the proxy.
    pub fn url(&self, url: &str) -> String {
        url.replace(authority(url), &self.address.to_string())
    }

    /// To the next request whose SQL contains this.
    pub fn next(&self, sql: &str, what: Do) -> Mishap {
        self.add(sql, what, false)
    }

    /// The same, and no connection works from then on, until the store is [back](Self::back).
    pub fn next_and_away(&self, sql: &str, what: Do) -> Mishap {
        self.add(sql, what, true)
    }

    fn add(&self, sql: &str, what: Do, leaves: bool) -> Mishap {
        let rule = Arc::new(Rule {
            sql: sql.into(),
            what,
            leaves,
            came: watch::channel(false).0,
            go: watch::channel(false).0,
        });
        self.shared.rules.lock().unwrap().push(Arc::clone(&rule));
        Mishap(rule)
    }

    /// Replaces text of every statement that is prepared from now on.
    pub fn rewrite(&self, from: &str, to: &str) {
        self.shared.rewrites.lock().unwrap().push((from.into(), to.into()));
    }

    /// Whether any statement was one to rewrite.
    pub fn has_rewritten(&self) -> bool {
        self.shared.rewritten.load(Ordering::SeqCst)
    }

    pub fn away(&self) {
        self.shared.leave();
    }

    pub fn back(&self) {
        self.shared.away.store(false, Ordering::SeqCst);
    }
}

fn authority(url: &str) -> &str {
    let rest = url.rsplit_once('@').unwrap().1;
    &rest[..rest.find('/').unwrap()]
}

impl Shared {
    fn leave(&self) {
        self.away.store(true, Ordering::SeqCst);
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    fn rule_for(&self, sql: &str) -> Option<Arc<Rule>> {
        let mut rules = self.rules.lock().unwrap();
        let found = rules.iter().position(|rule| sql.contains(&rule.sql))?;
        Some(rules.remove(found))
    }
}

/// A message: its type, and all of its bytes.
struct Message {
    kind: u8,
    bytes: Vec<u8>,
}

impl Message {
    fn read(from: &mut impl Read) -> io::Result<Self> {
        let mut bytes = vec![0; 5];
        from.read_exact(&mut bytes)?;
        let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize;
        bytes.resize(1 + length, 0);
        from.read_exact(&mut bytes[5..])?;
        Ok(Self { kind: bytes[0], bytes })
    }

    fn build(kind: u8, body: &[u8]) -> Self {
        let length = u32::try_from(4 + body.len()).unwrap().to_be_bytes();
        Self { kind, bytes: [&[kind], &length[..], body].concat() }
    }

    /// The nth of the texts, each ended by a zero, that its body begins with.
    fn text(&self, nth: usize) -> String {
        let text = self.bytes[5..].split(|byte| *byte == 0).nth(nth).unwrap();
        String::from_utf8(text.to_vec()).unwrap()
    }
}

/// How long the message is that ends a request of several.
const SYNC: usize = 5;

/// One connection.
struct Line {
    client: TcpStream,
    server: TcpStream,
    shared: Arc<Shared>,
    /// The requests that the server has not answered yet, with what shall happen to their answers.
    unanswered: Mutex<VecDeque<Option<Arc<Rule>>>>,
}

impl Line {
    fn open(mut client: TcpStream, upstream: SocketAddr, shared: &Arc<Shared>) -> io::Result<()> {
        let mut server = TcpStream::connect(upstream)?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        start(&mut client, &mut server)?;
        shared.sockets.lock().unwrap().extend([client.try_clone()?, server.try_clone()?]);
        let line = Arc::new(Self {
            client,
            server,
            shared: Arc::clone(shared),
            // The start-up is answered as well.
            unanswered: Mutex::new(VecDeque::from([None])),
        });
        let answers = Arc::clone(&line);
        thread::spawn(move || {
            let _ = line.carry_requests();
            line.cut();
        });
        thread::spawn(move || {
            let _ = answers.carry_answers();
            answers.cut();
        });
        Ok(())
    }

    fn cut(&self) {
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }

    fn carry_requests(&self) -> io::Result<()> {
        let mut prepared: HashMap<String, String> = HashMap::new();
        let mut request = Vec::new();
        let mut sql = None;
        loop {
            let mut message = Message::read(&mut &self.client)?;
            match message.kind {
                b'P' => {
                    message = self.rewritten(message);
                    prepared.insert(message.text(0), message.text(1));
                }
                b'B' => sql = prepared.get(&message.text(1)).cloned(),
                b'Q' => sql = Some(message.text(0)),
                _ => {}
            }
            request.extend(message.bytes);
            if !matches!(message.kind, b'Q' | b'S') {
                // The end of the session is no request.
                if message.kind == b'X' {
                    return (&self.server).write_all(&request);
                }
                continue;
            }
            let rule = sql.take().and_then(|sql| self.shared.rule_for(&sql));
            match rule.as_ref().map(|rule| rule.what) {
                Some(Do::CutRequest) => return self.cut_by(&rule.unwrap()),
                Some(Do::HoldRequest) => {
                    hold(&rule.unwrap());
                    self.unanswered.lock().unwrap().push_back(None);
                }
                Some(Do::HoldSync) => {
                    self.unanswered.lock().unwrap().push_back(None);
                    let sync = request.split_off(request.len() - SYNC);
                    (&self.server).write_all(&request)?;
                    hold(&rule.unwrap());
                    request = sync;
                }
                _ => self.unanswered.lock().unwrap().push_back(rule),
            }
            (&self.server).write_all(&request)?;
            request.clear();
        }
    }

    fn carry_answers(&self) -> io::Result<()> {
        let mut held = Vec::new();
        loop {
            let message = Message::read(&mut &self.server)?;
            let rule = self.unanswered.lock().unwrap().front().cloned().flatten();
            let is_last = message.kind == b'Z';
            if is_last {
                self.unanswered.lock().unwrap().pop_front();
            }
            let Some(rule) = rule else {
                (&self.client).write_all(&message.bytes)?;
                continue;
            };
            held.extend(message.bytes);
            if !is_last {
                continue;
            }
            match rule.what {
                Do::CutAnswer => return self.cut_by(&rule),
                Do::HoldAnswer => {
                    hold(&rule);
                    (&self.client).write_all(&held)?;
                }
                _ => {
                    rule.came.send_replace(true);
                }
            }
            held.clear();
        }
    }

    fn cut_by(&self, rule: &Rule) -> io::Result<()> {
        if rule.leaves {
            self.shared.leave();
        }
        // Whoever notices the cut finds that it has happened.
        rule.came.send_replace(true);
        self.cut();
        Err(ErrorKind::ConnectionReset.into())
    }

    fn rewritten(&self, parse: Message) -> Message {
        let (name, before) = (parse.text(0), parse.text(1));
        let after =
            self.shared.rewrites.lock().unwrap().iter().fold(before.clone(), |sql, (from, to)| sql.replace(from, to));
        if before == after {
            return parse;
        }
        self.shared.rewritten.store(true, Ordering::SeqCst);
        let types = &parse.bytes[5 + name.len() + 1 + before.len() + 1..];
        Message::build(b'P', &[name.as_bytes(), &[0], after.as_bytes(), &[0], types].concat())
    }
}

/// Says that it is here, and stays until it may go.
fn hold(rule: &Rule) {
    let mut go = rule.go.subscribe();
    rule.came.send_replace(true);
    // A test that has ended lets nobody go, but drops the other end with its rule.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let _ = runtime.block_on(go.wait_for(|go| *go));
}

/// Up to the start-up message, which has no type; a wish for encryption is declined.
fn start(client: &mut TcpStream, server: &mut TcpStream) -> io::Result<()> {
    const ENCRYPTION: [u8; 4] = 80_877_103_u32.to_be_bytes();
    loop {
        let mut bytes = vec![0; 8];
        client.read_exact(&mut bytes)?;
        if bytes[4..] == ENCRYPTION {
            client.write_all(b"N")?;
            continue;
        }
        bytes.resize(u32::from_be_bytes(bytes[..4].try_into().unwrap()) as usize, 0);
        client.read_exact(&mut bytes[8..])?;
        return server.write_all(&bytes);
    }
}
