// Calls of a client in Go (google.golang.org/grpc), one line of the result each.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"os"
	"strings"
	"sync"
	"time"

	pb "inference"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const unlimited = 1<<31 - 1

var address = os.Args[1]

func connect(more ...grpc.DialOption) (*grpc.ClientConn, pb.GRPCInferenceServiceClient) {
	security := grpc.WithInsecure()
	if root := os.Getenv("ROOT"); root != "" {
		trusted, err := credentials.NewClientTLSFromFile(root, "")
		must(err)
		security = grpc.WithTransportCredentials(trusted)
	}
	sizes := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(unlimited), grpc.MaxCallSendMsgSize(unlimited))
	connection, err := grpc.Dial(address, append(more, security, sizes)...)
	must(err)
	return connection, pb.NewGRPCInferenceServiceClient(connection)
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func expect(holds bool, what ...interface{}) {
	if !holds {
		panic(fmt.Sprint(what...))
	}
}

func input(name string, datatype string, size int) *pb.ModelInferRequest_InferInputTensor {
	return &pb.ModelInferRequest_InferInputTensor{Name: name, Datatype: datatype, Shape: []int64{int64(size)}}
}

func request(model string, data []byte) *pb.ModelInferRequest {
	inputs := []*pb.ModelInferRequest_InferInputTensor{input("IN", "UINT8", len(data))}
	return &pb.ModelInferRequest{ModelName: model, Inputs: inputs, RawInputContents: [][]byte{data}}
}

func repeat(id string, values []int32, delayMs uint32) *pb.ModelInferRequest {
	numbers, delays := new(bytes.Buffer), new(bytes.Buffer)
	for _, value := range values {
		must(binary.Write(numbers, binary.LittleEndian, value))
		must(binary.Write(delays, binary.LittleEndian, delayMs))
	}
	return &pb.ModelInferRequest{
		ModelName: "repeat", Id: id,
		Inputs: []*pb.ModelInferRequest_InferInputTensor{
			input("IN", "INT32", len(values)), input("DELAY", "UINT32", len(values)), input("WAIT", "UINT32", 1),
		},
		RawInputContents: [][]byte{numbers.Bytes(), delays.Bytes(), make([]byte, 4)},
	}
}

func random(size int) []byte {
	data := make([]byte, size)
	rand.Read(data)
	return data
}

func echoes(client pb.GRPCInferenceServiceClient, data []byte, options ...grpc.CallOption) {
	reply, err := client.ModelInfer(context.Background(), request("echo", data), options...)
	must(err)
	expect(bytes.Equal(reply.RawOutputContents[0], data), "other data came back")
}

func atOnce(count int, work func(int)) {
	var group sync.WaitGroup
	failures := make(chan interface{}, count)
	for n := 0; n < count; n++ {
		group.Add(1)
		go func(n int) {
			defer group.Done()
			defer func() {
				if problem := recover(); problem != nil {
					failures <- problem
				}
			}()
			work(n)
		}(n)
	}
	group.Wait()
	if len(failures) > 0 {
		panic(<-failures)
	}
}

func unary(client pb.GRPCInferenceServiceClient) {
	reply, err := client.ServerReady(context.Background(), &pb.ServerReadyRequest{})
	must(err)
	expect(reply.Ready, "not ready")
	for _, size := range []int{0, 1, 1000} {
		echoes(client, random(size))
	}
}

func large(client pb.GRPCInferenceServiceClient) {
	echoes(client, random(12<<20))
	atOnce(3, func(n int) { echoes(client, random((n+1)*3000000)) })
}

func many(client pb.GRPCInferenceServiceClient) {
	atOnce(500, func(n int) { echoes(client, random(n)) })
}

func stream(client pb.GRPCInferenceServiceClient) {
	const requests, responses = 100, 20
	call, err := client.ModelStreamInfer(context.Background())
	must(err)
	go func() {
		for n := int32(0); n < requests; n++ {
			values := make([]int32, responses)
			for i := range values {
				values[i] = n + int32(i)
			}
			must(call.Send(repeat(fmt.Sprint(n), values, 1)))
		}
		must(call.CloseSend())
	}()
	next := map[string]uint32{}
	for received := 0; ; received++ {
		message, err := call.Recv()
		if err == io.EOF {
			expect(received == requests*responses, "responses: ", received)
			return
		}
		must(err)
		id := message.InferResponse.Id
		value := binary.LittleEndian.Uint32(message.InferResponse.RawOutputContents[0])
		expect(fmt.Sprint(value-next[id]) == id, "response ", value, " of request ", id, " is out of order")
		next[id]++
	}
}

func streamError(client pb.GRPCInferenceServiceClient) {
	call, err := client.ModelStreamInfer(context.Background())
	must(err)
	must(call.Send(request("nope", nil)))
	message, err := call.Recv()
	must(err)
	expect(strings.Contains(message.ErrorMessage, "unknown model"), message)
	must(call.Send(repeat("good", []int32{7}, 0)))
	message, err = call.Recv()
	must(err)
	expect(message.ErrorMessage == "" && message.InferResponse.Id == "good", message)
	must(call.CloseSend())
	_, err = call.Recv()
	expect(err == io.EOF, err)
}

func cancel(client pb.GRPCInferenceServiceClient) {
	context1, stop := context.WithCancel(context.Background())
	call, err := client.ModelStreamInfer(context1)
	must(err)
	must(call.Send(repeat("endless", make([]int32, 10000), 5)))
	_, err = call.Recv()
	must(err)
	stop()
	for err == nil {
		_, err = call.Recv()
	}
	expect(status.Code(err) == codes.Canceled, err)
	context2, stop := context.WithCancel(context.Background())
	time.AfterFunc(50*time.Millisecond, stop)
	_, err = client.ModelInfer(context2, request("slow", random(1)))
	expect(status.Code(err) == codes.Canceled, err)
	echoes(client, random(10))
}

func deadline(client pb.GRPCInferenceServiceClient) {
	soon, stop := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer stop()
	_, err := client.ModelInfer(soon, request("slow", random(1)))
	expect(status.Code(err) == codes.DeadlineExceeded, err)
	late, stop := context.WithTimeout(context.Background(), 20*time.Second)
	defer stop()
	_, err = client.ModelInfer(late, request("echo", random(10)))
	must(err)
}

func forwarded(client pb.GRPCInferenceServiceClient) {
	with := metadata.AppendToOutgoingContext(context.Background(), "x-text", "some text", "x-data-bin", "binary \u00fc")
	reply, err := client.ModelInfer(with, request("describe", random(1)))
	must(err)
	seen := map[string]string{}
	must(json.Unmarshal(reply.RawOutputContents[0][4:], &seen))
	expect(len(seen) == 2 && seen["x-text"] == "some text" && seen["x-data-bin"] == "binary \u00fc", seen)
}

func failures(client pb.GRPCInferenceServiceClient) {
	_, err := client.ModelInfer(context.Background(), request("100% \u00fc\n\u6f22", nil))
	expect(status.Code(err) == codes.NotFound, err)
	expect(strings.Contains(err.Error(), "'100% \u00fc\n\u6f22' is not found"), err)
	connection, _ := connect()
	defer connection.Close()
	err = connection.Invoke(context.Background(), "/inference.GRPCInferenceService/Nope", request("x", nil), request("y", nil))
	expect(status.Code(err) == codes.Unimplemented, err)
}

func compressed(client pb.GRPCInferenceServiceClient) {
	echoes(client, make([]byte, 1000000), grpc.UseCompressor(gzip.Name))
	echoes(client, random(100000), grpc.UseCompressor(gzip.Name))
}

func smallWindows(pb.GRPCInferenceServiceClient) {
	connection, client := connect(grpc.WithInitialWindowSize(1<<16), grpc.WithInitialConnWindowSize(1<<16), grpc.WithReadBufferSize(0))
	defer connection.Close()
	atOnce(4, func(n int) { echoes(client, random(1000000)) })
}

func alive(pb.GRPCInferenceServiceClient) {
	connection, client := connect(grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 1, Timeout: time.Second, PermitWithoutStream: true}))
	defer connection.Close()
	call, err := client.ModelStreamInfer(context.Background())
	must(err)
	must(call.Send(repeat("long", []int32{1, 2, 3}, 300)))
	must(call.CloseSend())
	for received := 0; ; received++ {
		if _, err = call.Recv(); err == io.EOF {
			expect(received == 3, "responses: ", received)
			return
		}
		must(err)
	}
}

// The test stops the server and starts another one when this says so.
func restart(client pb.GRPCInferenceServiceClient) {
	over := make(chan struct{})
	go func() {
		bufio.NewReader(os.Stdin).ReadString('\n')
		close(over)
	}()
	fmt.Println("go")
	atOnce(8, func(int) {
		for {
			select {
			case <-over:
				return
			case <-time.After(5 * time.Millisecond):
				_, err := client.ModelInfer(context.Background(), request("echo", random(100)))
				code := status.Code(err)
				expect(code == codes.OK || code == codes.Unavailable, err)
			}
		}
	})
	soon, stop := context.WithTimeout(context.Background(), 30*time.Second)
	defer stop()
	_, err := client.ServerReady(soon, &pb.ServerReadyRequest{}, grpc.WaitForReady(true))
	must(err)
}

var scenarios = map[string]func(pb.GRPCInferenceServiceClient){
	"unary": unary, "large": large, "many": many, "stream": stream, "stream_error": streamError, "cancel": cancel,
	"deadline": deadline, "metadata": forwarded, "error": failures, "gzip": compressed, "settings": smallWindows,
	"keepalive": alive, "restart": restart,
}

func run(name string, client pb.GRPCInferenceServiceClient) {
	defer func() {
		if problem := recover(); problem != nil {
			fmt.Printf("failed %s: %v\n", name, problem)
		}
	}()
	scenarios[name](client)
	fmt.Println("ok", name)
}

func main() {
	connection, client := connect()
	defer connection.Close()
	for _, name := range os.Args[2:] {
		run(name, client)
	}
}
