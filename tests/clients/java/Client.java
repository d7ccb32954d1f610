// Calls of a client in Java (grpc-netty), one line of the result each.

import com.google.protobuf.ByteString;
import inference.GRPCInferenceServiceGrpc;
import inference.GRPCInferenceServiceGrpc.GRPCInferenceServiceBlockingStub;
import inference.GrpcService.ModelInferRequest;
import inference.GrpcService.ModelInferRequest.InferInputTensor;
import inference.GrpcService.ModelInferResponse;
import inference.GrpcService.ModelStreamInferResponse;
import inference.GrpcService.ServerReadyRequest;
import io.grpc.CallOptions;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.ClientResponseObserver;
import io.grpc.stub.MetadataUtils;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

public class Client {
  interface Scenario {
    void run(GRPCInferenceServiceBlockingStub client) throws Exception;
  }

  static String address;
  static final Map<String, Scenario> SCENARIOS = new HashMap<>();

  static NettyChannelBuilder builder() {
    return NettyChannelBuilder.forTarget(address).usePlaintext().maxInboundMessageSize(Integer.MAX_VALUE);
  }

  static void expect(boolean holds, Object what) {
    if (!holds) throw new AssertionError(String.valueOf(what));
  }

  static InferInputTensor input(String name, String datatype, int size) {
    return InferInputTensor.newBuilder().setName(name).setDatatype(datatype).addShape(size).build();
  }

  static ModelInferRequest request(String model, byte[] data) {
    return ModelInferRequest.newBuilder().setModelName(model).addInputs(input("IN", "UINT8", data.length))
        .addRawInputContents(ByteString.copyFrom(data)).build();
  }

  static ModelInferRequest repeat(String id, int[] values, int delayMs) {
    ByteBuffer numbers = ByteBuffer.allocate(4 * values.length).order(ByteOrder.LITTLE_ENDIAN);
    ByteBuffer delays = ByteBuffer.allocate(4 * values.length).order(ByteOrder.LITTLE_ENDIAN);
    for (int value : values) {
      numbers.putInt(value);
      delays.putInt(delayMs);
    }
    return ModelInferRequest.newBuilder().setModelName("repeat").setId(id)
        .addInputs(input("IN", "INT32", values.length)).addInputs(input("DELAY", "UINT32", values.length))
        .addInputs(input("WAIT", "UINT32", 1)).addRawInputContents(ByteString.copyFrom(numbers.array()))
        .addRawInputContents(ByteString.copyFrom(delays.array())).addRawInputContents(ByteString.copyFrom(new byte[4]))
        .build();
  }

  static byte[] random(int size) {
    byte[] data = new byte[size];
    new Random(size).nextBytes(data);
    return data;
  }

  static void echoes(GRPCInferenceServiceBlockingStub client, byte[] data) {
    ByteString back = client.modelInfer(request("echo", data)).getRawOutputContents(0);
    expect(back.equals(ByteString.copyFrom(data)), "other data came back");
  }

  static void atOnce(int count, Scenario work, GRPCInferenceServiceBlockingStub client) throws Exception {
    var threads = Executors.newFixedThreadPool(count);
    List<Future<Void>> running = new ArrayList<>();
    for (int n = 0; n < count; n++) {
      running.add(threads.submit(() -> {
        work.run(client);
        return null;
      }));
    }
    for (Future<Void> each : running) each.get();
    threads.shutdown();
  }

  static Status failure(Runnable call) {
    try {
      call.run();
    } catch (StatusRuntimeException error) {
      return error.getStatus();
    }
    throw new AssertionError("the call did not fail");
  }

  // What one stream has brought, and how it has ended.
  static class Collected implements ClientResponseObserver<ModelInferRequest, ModelStreamInferResponse> {
    final List<ModelStreamInferResponse> messages = new ArrayList<>();
    final CountDownLatch begun = new CountDownLatch(1);
    final CountDownLatch ended = new CountDownLatch(1);
    Status status = Status.OK;
    ClientCallStreamObserver<ModelInferRequest> call;

    public void beforeStart(ClientCallStreamObserver<ModelInferRequest> call) {
      this.call = call;
    }

    public void onNext(ModelStreamInferResponse message) {
      messages.add(message);
      begun.countDown();
    }

    public void onError(Throwable error) {
      status = Status.fromThrowable(error);
      ended.countDown();
    }

    public void onCompleted() {
      ended.countDown();
    }

    List<ModelStreamInferResponse> all() throws Exception {
      expect(ended.await(60, TimeUnit.SECONDS), "the stream does not end");
      expect(status.isOk(), status);
      return messages;
    }
  }

  static Collected open(GRPCInferenceServiceBlockingStub client) {
    Collected collected = new Collected();
    GRPCInferenceServiceGrpc.newStub(client.getChannel()).modelStreamInfer(collected);
    return collected;
  }

  static void stream(GRPCInferenceServiceBlockingStub client) throws Exception {
    final int requests = 100, responses = 20;
    Collected collected = open(client);
    for (int n = 0; n < requests; n++) {
      int[] values = new int[responses];
      for (int i = 0; i < responses; i++) values[i] = n + i;
      collected.call.onNext(repeat(String.valueOf(n), values, 1));
    }
    collected.call.onCompleted();
    Map<String, Integer> next = new HashMap<>();
    for (ModelStreamInferResponse message : collected.all()) {
      ModelInferResponse response = message.getInferResponse();
      int value = response.getRawOutputContents(0).asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).getInt();
      int expected = next.merge(response.getId(), 1, Integer::sum) - 1 + Integer.parseInt(response.getId());
      expect(value == expected, "out of order: " + message);
    }
    expect(collected.messages.size() == requests * responses, collected.messages.size());
  }

  static void streamError(GRPCInferenceServiceBlockingStub client) throws Exception {
    Collected collected = open(client);
    collected.call.onNext(request("nope", new byte[0]));
    expect(collected.begun.await(20, TimeUnit.SECONDS), "no answer");
    collected.call.onNext(repeat("good", new int[] {7}, 0));
    collected.call.onCompleted();
    List<ModelStreamInferResponse> all = collected.all();
    expect(all.size() == 2 && all.get(0).getErrorMessage().contains("unknown model"), all);
    expect(all.get(1).getErrorMessage().isEmpty() && all.get(1).getInferResponse().getId().equals("good"), all);
  }

  static void cancel(GRPCInferenceServiceBlockingStub client) throws Exception {
    Collected collected = open(client);
    collected.call.onNext(repeat("endless", new int[10000], 5));
    expect(collected.begun.await(20, TimeUnit.SECONDS), "no answer");
    collected.call.cancel("enough", null);
    expect(collected.ended.await(20, TimeUnit.SECONDS), "the stream does not end");
    expect(collected.status.getCode() == Status.Code.CANCELLED, collected.status);
    Context.CancellableContext context = Context.current().withCancellation();
    new Thread(() -> {
      try {
        Thread.sleep(50);
      } catch (InterruptedException error) {
        throw new AssertionError(error);
      }
      context.cancel(null);
    }).start();
    Status status = failure(() -> context.run(() -> client.modelInfer(request("slow", random(1)))));
    expect(status.getCode() == Status.Code.CANCELLED, status);
    echoes(client, random(10));
  }

  static void deadline(GRPCInferenceServiceBlockingStub client) {
    var hurried = client.withDeadlineAfter(200, TimeUnit.MILLISECONDS);
    Status status = failure(() -> hurried.modelInfer(request("slow", random(1))));
    expect(status.getCode() == Status.Code.DEADLINE_EXCEEDED, status);
    echoes(client.withDeadlineAfter(20, TimeUnit.SECONDS), random(10));
  }

  static void metadata(GRPCInferenceServiceBlockingStub client) {
    Metadata metadata = new Metadata();
    metadata.put(Metadata.Key.of("x-text", Metadata.ASCII_STRING_MARSHALLER), "some text");
    byte[] binary = "binary \u00fc".getBytes(StandardCharsets.UTF_8);
    metadata.put(Metadata.Key.of("x-data-bin", Metadata.BINARY_BYTE_MARSHALLER), binary);
    var described = client.withInterceptors(MetadataUtils.newAttachHeadersInterceptor(metadata));
    String seen = described.modelInfer(request("describe", random(1))).getRawOutputContents(0).toStringUtf8();
    expect(seen.contains("\"x-text\": \"some text\"") && seen.contains("\"x-data-bin\": \"binary \\u00fc\""), seen);
  }

  static void error(GRPCInferenceServiceBlockingStub client) {
    Status status = failure(() -> client.modelInfer(request("100% \u00fc\n\u6f22", new byte[0])));
    expect(status.getCode() == Status.Code.NOT_FOUND, status);
    expect(status.getDescription().contains("'100% \u00fc\n\u6f22' is not found"), status);
    MethodDescriptor<ModelInferRequest, ModelInferResponse> nope = GRPCInferenceServiceGrpc.getModelInferMethod()
        .toBuilder().setFullMethodName("inference.GRPCInferenceService/Nope").build();
    Status missing = failure(() ->
        ClientCalls.blockingUnaryCall(client.getChannel(), nope, CallOptions.DEFAULT, request("x", new byte[0])));
    expect(missing.getCode() == Status.Code.UNIMPLEMENTED, missing);
  }

  static void settings(GRPCInferenceServiceBlockingStub ignored) throws Exception {
    ManagedChannel channel = builder().initialFlowControlWindow(1000).maxInboundMetadataSize(4000).build();
    atOnce(4, own -> echoes(own, random(50000)), GRPCInferenceServiceGrpc.newBlockingStub(channel));
    channel.shutdownNow();
  }

  static void keepalive(GRPCInferenceServiceBlockingStub ignored) throws Exception {
    ManagedChannel channel = builder().keepAliveTime(1, TimeUnit.MILLISECONDS).keepAliveWithoutCalls(true).build();
    Collected collected = open(GRPCInferenceServiceGrpc.newBlockingStub(channel));
    collected.call.onNext(repeat("long", new int[] {1, 2, 3}, 300));
    collected.call.onCompleted();
    expect(collected.all().size() == 3, collected.messages);
    channel.shutdownNow();
  }

  // The test stops the server and starts another one when this says so.
  static void restart(GRPCInferenceServiceBlockingStub client) throws Exception {
    CountDownLatch over = new CountDownLatch(1);
    Thread listener = new Thread(() -> {
      try {
        System.in.read();
      } catch (java.io.IOException error) {
        throw new AssertionError(error);
      }
      over.countDown();
    });
    listener.start();
    System.out.println("go");
    atOnce(8, own -> {
      while (!over.await(5, TimeUnit.MILLISECONDS)) {
        try {
          own.modelInfer(request("echo", random(100)));
        } catch (StatusRuntimeException error) {
          expect(error.getStatus().getCode() == Status.Code.UNAVAILABLE, error.getStatus());
        }
      }
    }, client);
    client.withWaitForReady().withDeadlineAfter(30, TimeUnit.SECONDS).serverReady(ServerReadyRequest.getDefaultInstance());
  }

  static {
    SCENARIOS.put("unary", client -> {
      expect(client.serverReady(ServerReadyRequest.getDefaultInstance()).getReady(), "not ready");
      for (int size : new int[] {0, 1, 1000}) echoes(client, random(size));
    });
    SCENARIOS.put("large", client -> {
      echoes(client, random(12 << 20));
      atOnce(3, own -> echoes(own, random(3000000)), client);
    });
    SCENARIOS.put("many", client -> atOnce(200, own -> echoes(own, random(300)), client));
    SCENARIOS.put("stream", Client::stream);
    SCENARIOS.put("stream_error", Client::streamError);
    SCENARIOS.put("cancel", Client::cancel);
    SCENARIOS.put("deadline", Client::deadline);
    SCENARIOS.put("metadata", Client::metadata);
    SCENARIOS.put("error", Client::error);
    SCENARIOS.put("gzip", client -> echoes(client.withCompression("gzip"), new byte[1000000]));
    SCENARIOS.put("keepalive", Client::keepalive);
    SCENARIOS.put("settings", Client::settings);
    SCENARIOS.put("restart", Client::restart);
  }

  public static void main(String[] arguments) throws Exception {
    address = arguments[0];
    ManagedChannel channel = builder().build();
    for (int n = 1; n < arguments.length; n++) {
      try {
        SCENARIOS.get(arguments[n]).run(GRPCInferenceServiceGrpc.newBlockingStub(channel));
        System.out.println("ok " + arguments[n]);
      } catch (Throwable error) {
        System.out.println("failed " + arguments[n] + ": " + error);
      }
    }
    channel.shutdownNow();
    System.exit(0);
  }
}
